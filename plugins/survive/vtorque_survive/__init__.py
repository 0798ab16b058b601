"""Jobs that stand still and go on, also as another: by their owner's or batch system's word."""
