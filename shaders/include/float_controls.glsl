// What a driver may otherwise choose for itself: rounding, signed zeros, infinities and NaN; with DENORM_PRESERVE also
// subnormals (for devices that report it). The numbers are SPIR-V's: capability, then execution mode, then the width.
#extension GL_EXT_spirv_intrinsics : require
spirv_execution_mode(extensions = ["SPV_KHR_float_controls"], capabilities = [4467], 4462, 32);  // RoundingModeRTE
spirv_execution_mode(extensions = ["SPV_KHR_float_controls"], capabilities = [4466], 4461, 32);  // SignedZeroInfNanPreserve
#ifdef DENORM_PRESERVE
spirv_execution_mode(extensions = ["SPV_KHR_float_controls"], capabilities = [4464], 4459, 32);  // DenormPreserve
#endif
