"""The Linux guest type: cloud-init and micro images, the guest agent, image builders."""
