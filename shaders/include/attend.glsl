// Attention in one dispatch: a group takes a row and HEADS query heads of one kv head, and KEYS positions at a time.
//
// 8 invocations share a key, one in 8 lanes each; then each invocation finishes a score; then each takes a column of v, all
// 32 lanes' sums in registers. Scores are computed twice, once for m, so that none has to be stored. What includes this has
// included attention.glsl, and bound values (and v), slab and attended.

const uint BRANCHES = 4;      // invocations that share a column of v, each with every 4th lane
const uint OWN_LANES = 8;     // of an invocation
const uint SUMS = HEADS * 8;  // named, as each product written out would make an array type of its own

shared uint places[KEYS];  // where a key's values begin, in the cache or in the block
shared float inverses[HEADS];

float sink_of(Task t, uint h) {
    return slab[sinks_at + head_of(t, h)];
}

// maxima[h] takes the sink's part.
void add_sinks(Task t) {
    uint id = gl_LocalInvocationID.x;
    if (id < HEADS && has_sink != 0) maxima[id] = larger(maxima[id], sink_of(t, id));
    barrier();
}

// weights[h][key] = e of the scores of a chunk, and where the values lie.
void find_weights(Task t, uint j0) {
    uint id = gl_LocalInvocationID.x, j = j0 + id;
    if (!visible(t, j)) return;
#ifdef PATCHES
    places[id] = values_at + cached_row(t, j) * v_dim;
#else
    places[id] = j >= start ? own_row(t, j) * v_dim : values_at + cached_row(t, j) * v_dim;
#endif
    [[unroll]] for (uint h = 0; h < HEADS; h++) {
        precise float distance = SCORE(t, j, h) - maxima[h];
        weights[h * KEYS + id] = elementary_exp(distance);
    }
}

// The chunk's keys from `first_key` up to `end`, which all lie in one buffer, round by round.
#define ADD_VALUES(buffer, first_key, end)                                                                \
    for (uint round = (first_key) / LANES * LANES; round < (end); round += LANES) {                       \
        [[unroll]] for (uint i = 0; i < OWN_LANES; i++) {                                                 \
            uint key = round + branch + BRANCHES * i;                                                     \
            if (key >= (first_key) && key < (end)) {                                                      \
                uvec4 at = places[key] + d;                                                               \
                vec4 value = vec4(buffer[at.x], buffer[at.y], buffer[at.z], buffer[at.w]);                \
                [[unroll]] for (uint h = 0; h < HEADS; h++) {                                             \
                    precise vec4 product = weights[h * KEYS + key] * value;                               \
                    precise vec4 sum = acc[h * OWN_LANES + i] + product;                                  \
                    acc[h * OWN_LANES + i] = sum;                                                         \
                }                                                                                         \
            }                                                                                             \
        }                                                                                                 \
    }

// Lanes branch, branch + 4, ... of columns id % 32, + 32, + 64, + 96 from d0 on; what is past the last column repeats it.
void add_values(Task t, uint j0, uint d0, inout vec4 acc[SUMS]) {
    uint branch = gl_LocalInvocationID.x / LANES, c = d0 + gl_LocalInvocationID.x % LANES;
    uvec4 d = min(uvec4(c, c + 32, c + 64, c + 96), uvec4(v_dim - 1));
#ifdef PATCHES
    ADD_VALUES(values, key_of(t.low, j0), key_of(t.high + 1, j0))
#else
    uint first_key = key_of(t.low, j0), middle = key_of(start, j0), end = key_of(t.high + 1, j0);
    ADD_VALUES(values, first_key, middle)
    ADD_VALUES(v, max(first_key, middle), end)
#endif
}

// The trees of this invocation's lanes, into partials [head][branch][column].
void write_branches(vec4 acc[SUMS]) {
    uint id = gl_LocalInvocationID.x;
    [[unroll]] for (uint h = 0; h < HEADS; h++) {
        precise vec4 a = acc[h * OWN_LANES] + acc[h * OWN_LANES + 4];
        precise vec4 b = acc[h * OWN_LANES + 1] + acc[h * OWN_LANES + 5];
        precise vec4 c = acc[h * OWN_LANES + 2] + acc[h * OWN_LANES + 6];
        precise vec4 d = acc[h * OWN_LANES + 3] + acc[h * OWN_LANES + 7];
        precise vec4 ac = a + c, bd = b + d;
        precise vec4 total = ac + bd;
        uint at = (h * BRANCHES + id / LANES) * KEYS + id % LANES;
        [[unroll]] for (uint i = 0; i < 4; i++) partials[at + LANES * i] = total[i];
    }
}

// Invocation id adds the weights of head id / 32's lane id % 32.
float add_weights(Task t, uint j0, float lane_sum) {
    uint id = gl_LocalInvocationID.x, lane = id % LANES;
    precise float sum = lane_sum;
    for (uint key = lane; key < KEYS; key += LANES) {
        if (visible(t, j0 + key)) sum = sum + weights[id / LANES * KEYS + key];
    }
    return sum;
}

// inverses[h] = reciprocal(the tree of the head's lanes, and the sink's share)
void find_inverses(Task t, float lane_sum) {
    uint id = gl_LocalInvocationID.x;
    if (id < HEADS * LANES) weights[id] = lane_sum;
    barrier();
    if (id < HEADS) {
        vec4 quads[8];
        [[unroll]] for (uint i = 0; i < 8; i++) {
            uint at = id * LANES + 4 * i;
            quads[i] = vec4(weights[at], weights[at + 1], weights[at + 2], weights[at + 3]);
        }
        precise float den = tree32(quads[0], quads[1], quads[2], quads[3], quads[4], quads[5], quads[6], quads[7]);
        if (has_sink != 0) {
            precise float distance = sink_of(t, id) - maxima[id];
            den = den + elementary_exp(distance);
        }
        inverses[id] = elementary_reciprocal(den);
    }
    barrier();
}

// Columns d0 to d0 + 127 of the result. Two passes over the chunks in one loop, as compilers write out each call of
// add_products: the first finds the maxima.
void attend(Task t, uint d0) {
    uint id = gl_LocalInvocationID.x, d = d0 + id;
    vec4 acc[SUMS];
    float m[HEADS], lane_sum = runtime_zero();
    [[unroll]] for (uint i = 0; i < SUMS; i++) acc[i] = vec4(runtime_zero());
    [[unroll]] for (uint h = 0; h < HEADS; h++) m[h] = uintBitsToFloat(INFINITY_BITS | SIGN_BIT);
    for (uint pass = 0; pass < 2; pass++) {
        for (uint j0 = t.low - t.low % LANES; j0 <= t.high; j0 += KEYS) {
            add_products(t, j0);
            barrier();
            if (pass == 0) {
                take_maxima(t, j0, m);
                barrier();
                continue;
            }
            find_weights(t, j0);
            barrier();
            if (id < HEADS * LANES) lane_sum = add_weights(t, j0, lane_sum);
            add_values(t, j0, d0, acc);
        }
        if (pass > 0) continue;
        reduce_maxima(m);
        add_sinks(t);
    }
    barrier();
    write_branches(acc);
    find_inverses(t, lane_sum);
    for (uint h = 0; h < HEADS && t.head + h <= t.last_head && d < v_dim; h++) {
        uint at = h * BRANCHES * KEYS + id;
        float total = tree4(vec4(partials[at], partials[at + KEYS], partials[at + 2 * KEYS], partials[at + 3 * KEYS]));
        precise float result = total * inverses[h];
        attended[t.row * out_stride + (t.head + h) * v_dim + d] = result;
    }
    barrier();
}

void main() {
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_WorkGroupID.x; i < tasks(); i += gl_NumWorkGroups.x) {
            Task t = task_of(row, i);
            load_q(t);
            for (uint d0 = 0; d0 < v_dim; d0 += gl_WorkGroupSize.x) attend(t, d0);
        }
    }
}
