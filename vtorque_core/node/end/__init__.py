"""Epilogue, release and reaper."""
