// Every dense kernel's binding 0, which the host writes before a program runs. Rows from `rows` on are left alone.

layout(std430, binding = 0) readonly buffer Step {
    uint rows;      // of this block
    uint start;     // position of its first row
    uint first;     // row of the input that is row 0 here; rms_norm and embed read it
    uint patches;   // of the whole picture; patch_attention reads it
};

// +0 that no compiler can know: a sum that starts from a literal may be folded to its first term, and keep a -0.
float runtime_zero() {
    return uintBitsToFloat(rows >> 31);
}
