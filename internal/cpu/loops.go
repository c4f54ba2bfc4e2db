package cpu

import "math"

// The inner loops of the Go kernels. Each loads an element of a key or value once for all rows of
// queries that it is given; the slices are cut to one length so that the compiler drops bounds checks.

// dot1x4 is s[i] = q . ki.
func dot1x4[F real](s *[4]F, q, k0, k1, k2, k3 []F) {
	n := len(q)
	k0, k1, k2, k3 = k0[:n], k1[:n], k2[:n], k3[:n]
	var a0, a1, a2, a3, b0, b1, b2, b3 F
	i := 0
	for ; i < n-1; i += 2 { // two sums each: one addition waits for the other's result
		x, y := q[i], q[i+1]
		a0 += x * k0[i]
		a1 += x * k1[i]
		a2 += x * k2[i]
		a3 += x * k3[i]
		b0 += y * k0[i+1]
		b1 += y * k1[i+1]
		b2 += y * k2[i+1]
		b3 += y * k3[i+1]
	}
	if i < n {
		x := q[i]
		a0 += x * k0[i]
		a1 += x * k1[i]
		a2 += x * k2[i]
		a3 += x * k3[i]
	}
	s[0], s[1], s[2], s[3] = a0+b0, a1+b1, a2+b2, a3+b3
}

// dot2x4 is s[i] = q . ki, t[i] = r . ki.
func dot2x4[F real](s, t *[4]F, q, r, k0, k1, k2, k3 []F) {
	n := len(q)
	r, k0, k1, k2, k3 = r[:n], k0[:n], k1[:n], k2[:n], k3[:n]
	var s0, s1, s2, s3, t0, t1, t2, t3 F
	for i, x := range q {
		y := r[i]
		k := k0[i]
		s0 += x * k
		t0 += y * k
		k = k1[i]
		s1 += x * k
		t1 += y * k
		k = k2[i]
		s2 += x * k
		t2 += y * k
		k = k3[i]
		s3 += x * k
		t3 += y * k
	}
	s[0], s[1], s[2], s[3] = s0, s1, s2, s3
	t[0], t[1], t[2], t[3] = t0, t1, t2, t3
}

// add1 is o += p*v.
func add1[F real](o []F, p F, v []F) {
	v = v[:len(o)]
	for i := range o {
		o[i] += p * v[i]
	}
}

// add1x4 is o += sum p[i]*vi.
func add1x4[F real](o []F, p *[4]F, v0, v1, v2, v3 []F) {
	n := len(o)
	v0, v1, v2, v3 = v0[:n], v1[:n], v2[:n], v3[:n]
	p0, p1, p2, p3 := p[0], p[1], p[2], p[3]
	for i := range o {
		o[i] += p0*v0[i] + p1*v1[i] + (p2*v2[i] + p3*v3[i])
	}
}

// add2x4 is o += sum p[i]*vi, u += sum r[i]*vi.
func add2x4[F real](o, u []F, p, r *[4]F, v0, v1, v2, v3 []F) {
	n := len(o)
	u, v0, v1, v2, v3 = u[:n], v0[:n], v1[:n], v2[:n], v3[:n]
	p0, p1, p2, p3 := p[0], p[1], p[2], p[3]
	r0, r1, r2, r3 := r[0], r[1], r[2], r[3]
	for i := range o {
		a, b, c, d := v0[i], v1[i], v2[i], v3[i]
		o[i] += p0*a + p1*b + (p2*c + p3*d)
		u[i] += r0*a + r1*b + (r2*c + r3*d)
	}
}

// maximum returns the largest of s: -Inf if there is none, NaN if there is a NaN.
func maximum[F real](s []F) F {
	if len(s) < 4 {
		return greatest(F(math.Inf(-1)), s)
	}
	m := [4]F(s)
	i := 4
	for ; i < len(s)-3; i += 4 {
		x := (*[4]F)(s[i:])
		m[0], m[1], m[2], m[3] = max(m[0], x[0]), max(m[1], x[1]), max(m[2], x[2]), max(m[3], x[3])
	}
	return greatest(max(max(m[0], m[1]), max(m[2], m[3])), s[i:])
}

func greatest[F real](m F, s []F) F {
	for _, x := range s {
		m = max(m, x)
	}
	return m
}
