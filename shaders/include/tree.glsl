// The tree over the 4 lanes that are left of 32: lane l takes l + 2, then l + 1.
float tree4(vec4 lanes) {
    precise vec2 pairs = lanes.xy + lanes.zw;
    precise float total = pairs.x + pairs.y;
    return total;
}

// Over 8 lane quads, quad q's lanes being 4*q to 4*q + 3: l + 16, l + 8, l + 4, then the last four.
float tree32(vec4 q0, vec4 q1, vec4 q2, vec4 q3, vec4 q4, vec4 q5, vec4 q6, vec4 q7) {
    precise vec4 a = q0 + q4, b = q1 + q5, c = q2 + q6, d = q3 + q7;
    precise vec4 e = a + c, f = b + d;
    precise vec4 g = e + f;
    return tree4(g);
}
