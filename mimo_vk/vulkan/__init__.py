"""The Vulkan side: a child process that owns the device, the dense layers and the hot experts that live there."""
