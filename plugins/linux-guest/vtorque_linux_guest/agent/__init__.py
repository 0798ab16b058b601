"""The guest agent: its C sources and their build."""
