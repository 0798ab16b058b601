"""The pool's own drivers. Each imports its libraries when it is created."""
