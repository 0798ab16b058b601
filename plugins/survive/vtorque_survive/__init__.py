"""Jobs that stand still and go on: by their owner's word, or their batch system's."""
