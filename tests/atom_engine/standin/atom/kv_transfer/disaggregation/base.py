"""Base classes of connectors, with the methods that ATOM requires of a scheduler's half since its #2167."""

from abc import ABC, abstractmethod
from typing import Any


class KVConnectorBase(ABC):
    """A worker's half."""

    @abstractmethod
    def register_kv_caches(self, kv_caches: Any, transfer_tensors: Any = None, num_blocks: Any = None) -> None: ...

    @abstractmethod
    def start_load_kv(self, metadata: Any) -> None: ...

    @abstractmethod
    def get_finished(self) -> Any: ...


class KVConnectorSchedulerBase(ABC):
    """The scheduler's half."""

    @abstractmethod
    def get_num_new_matched_tokens(self, seq: Any) -> tuple[int, bool]: ...

    @abstractmethod
    def build_connector_meta(self) -> Any: ...

    @abstractmethod
    def update_state_after_alloc(self, seq: Any) -> None: ...

    @abstractmethod
    def request_finished(self, seq: Any) -> None: ...

    @abstractmethod
    def should_defer_free(self, seq: Any) -> bool: ...

    @abstractmethod
    def send_finished(self, req_id: Any) -> None: ...

    @abstractmethod
    def source_blocks_released(self, seq: Any) -> None: ...
