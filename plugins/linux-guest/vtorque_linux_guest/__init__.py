"""vTorque guest type for Linux: cloud-init and micro images, the stream agent, image builders."""
