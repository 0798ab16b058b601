"""The epilogue, release and the reaper."""
