"""Values passed between connectors and ATOM, with the fields that an offload connector uses."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SaveOperationId:
    req_id: Any
    generation: int


@dataclass(frozen=True)
class LoadOperationId:
    req_id: Any
    generation: int


@dataclass(frozen=True)
class ConnectorCompletion:
    channel: str
    operation_id: Any
    succeeded: bool


@dataclass
class KVConnectorOutput:
    finished_sending: set[Any] = field(default_factory=set)
    finished_recving: set[Any] = field(default_factory=set)
    failed_recving: set[Any] = field(default_factory=set)
    finished_saving: set[Any] = field(default_factory=set)
    finished_loading: set[Any] = field(default_factory=set)
    failed_loading: set[Any] = field(default_factory=set)
    connector_completions: set[ConnectorCompletion] = field(default_factory=set)
