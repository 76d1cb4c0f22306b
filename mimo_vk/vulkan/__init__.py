"""The Vulkan side: a child process that owns the device, and the hot experts that live there."""
