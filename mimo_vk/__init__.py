"""mimo-vk: run Xiaomi's MiMo-V2.6 from the released checkpoint on one ordinary machine."""

__version__ = "0.1.0"
