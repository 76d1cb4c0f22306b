// y[r][y_at + j] = row j of a matrix times row r of x, in the order of mimo_vk/ops.py, for any format of 32-bit words.
//
// A row of the matrix is `items` uvec4 from `w_at` words on, each 4 neighbouring lanes' words, zeros past the last column;
// a row of x has x_stride floats, zeros past the last column too. 8 invocations (an octet) share a row: neighbours read
// neighbouring uvec4, each keeps its own 4 lanes, and the tree goes through shared memory. An octet multiplies OUTPUTS rows
// of the matrix with ROWS rows of x at a time, so that each word is read and decoded once for ROWS rows, and each value of
// x loaded once for OUTPUTS.
//
// What includes this has defined GROUP, the columns of a word, and the functions
//   void decode(uvec4 words, out vec4 v[GROUP])         column c of 4 lanes' words
//   uint scales_of(uint j)                              where row j's block scales begin
//   vec4 scaled(vec4 partial, uint scales, uint round)  a partial times its block's scale
//   float finished(float total, uint j)                 the finished sum times its row's scale

layout(constant_id = 0) const uint ROWS = 1;
layout(constant_id = 1) const uint OUTPUTS = 1;

layout(local_size_x = 64) in;
const uint OCTETS = 8;

shared vec4 lanes[64 * ROWS * OUTPUTS];  // [output of the octet][row][octet][quad]

// The columns of 4 lanes' words, column by column: GROUP vec4 from 4 * GROUP neighbouring floats.
void load_x(uint at, out vec4 v[GROUP]) {
#if GROUP == 1
    v[0] = x[at];
#elif GROUP == 2
    vec4 a = x[at], b = x[at + 1];
    v[0] = vec4(a.xz, b.xz);
    v[1] = vec4(a.yw, b.yw);
#else
    mat4 t = transpose(mat4(x[at], x[at + 1], x[at + 2], x[at + 3]));
    v[0] = t[0];
    v[1] = t[1];
    v[2] = t[2];
    v[3] = t[3];
#endif
}

void add_products(uint quad, uint j0, uint row0) {
    vec4 acc[ROWS * OUTPUTS];
    uint row_at[OUTPUTS], scales_at[OUTPUTS];
    [[unroll]] for (uint i = 0; i < ROWS * OUTPUTS; i++) acc[i] = vec4(runtime_zero());
    [[unroll]] for (uint o = 0; o < OUTPUTS; o++) {
        uint j = min(j0 + o * OCTETS, n - 1);
        row_at[o] = (w_at >> 2) + j * items;
        scales_at[o] = scales_of(j);
    }
    for (uint item = quad; item < items; item += 8) {
        vec4 columns[ROWS * GROUP];
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            vec4 v[GROUP];
            load_x((min(row0 + r, rows - 1) * x_stride >> 2) + item * GROUP, v);
            [[unroll]] for (uint c = 0; c < GROUP; c++) columns[r * GROUP + c] = v[c];
        }
        [[unroll]] for (uint o = 0; o < OUTPUTS; o++) {
            vec4 v[GROUP];
            decode(w[row_at[o] + item], v);
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                precise vec4 p = v[0] * columns[r * GROUP];
                [[unroll]] for (uint c = 1; c < GROUP; c++) {
                    precise vec4 product = v[c] * columns[r * GROUP + c];
                    p = p + product;
                }
                precise vec4 sum = acc[o * ROWS + r] + scaled(p, scales_at[o], item >> 3);
                acc[o * ROWS + r] = sum;
            }
        }
    }
    [[unroll]] for (uint i = 0; i < ROWS * OUTPUTS; i++) lanes[i * 64 + gl_LocalInvocationID.x] = acc[i];
}

// Each invocation finishes some of the group's 8 * OUTPUTS * ROWS sums.
void write_sums(uint tile, uint row0) {
    for (uint i = gl_LocalInvocationID.x; i < OCTETS * OUTPUTS * ROWS; i += 64) {
        uint r = i / OCTETS % ROWS, o = i / OCTETS / ROWS, at = i * 8;
        uint row = row0 + r, j = tile * OCTETS * OUTPUTS + o * OCTETS + i % OCTETS;
        float total = tree32(lanes[at], lanes[at + 1], lanes[at + 2], lanes[at + 3], lanes[at + 4], lanes[at + 5],
                             lanes[at + 6], lanes[at + 7]);
        if (row < rows && j < n) y[row * y_stride + y_at + j] = finished(total, j);
    }
}

// Any number of groups serves any number of outputs and rows.
void main() {
    uint octet = gl_LocalInvocationID.x >> 3, quad = gl_LocalInvocationID.x & 7;
    for (uint row0 = gl_WorkGroupID.y * ROWS; row0 < rows; row0 += gl_NumWorkGroups.y * ROWS) {
        for (uint tile = gl_WorkGroupID.x; tile * OCTETS * OUTPUTS < n; tile += gl_NumWorkGroups.x) {
            add_products(quad, tile * OCTETS * OUTPUTS + octet, row0);
            barrier();
            write_sums(tile, row0);
            barrier();
        }
    }
}
