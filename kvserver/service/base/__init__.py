"""Events, effects and deadlines: the vocabulary of the whole service."""
