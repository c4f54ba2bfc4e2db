package vector

import (
	"math"

	"gorgonia.org/leanattention/internal/cpu"
)

// The inner loops of the Go kernels. The shape of each was chosen by measurement: with more sums at a time, or two
// rows of queries at once, the compiler spills registers and loses the gain. Slices are cut to one length first, so
// that the loops have no bounds checks.

// Dot4 computes s[i] = q . ki.
func Dot4[F cpu.Real](s *[4]F, q, k0, k1, k2, k3 []F) {
	n := len(q)
	k0, k1, k2, k3 = k0[:n], k1[:n], k2[:n], k3[:n]
	var s0, s1, s2, s3 F
	i := 0
	for ; i < n-1; i += 2 { // two products a sum: half as many dependent additions
		x, y := q[i], q[i+1]
		s0 += x*k0[i] + y*k0[i+1]
		s1 += x*k1[i] + y*k1[i+1]
		s2 += x*k2[i] + y*k2[i+1]
		s3 += x*k3[i] + y*k3[i+1]
	}
	if i < n {
		x := q[i]
		s0 += x * k0[i]
		s1 += x * k1[i]
		s2 += x * k2[i]
		s3 += x * k3[i]
	}
	s[0], s[1], s[2], s[3] = s0, s1, s2, s3
}

// Add4 computes o += sum p[i]*vi.
func Add4[F cpu.Real](o []F, p *[4]F, v0, v1, v2, v3 []F) {
	n := len(o)
	v0, v1, v2, v3 = v0[:n], v1[:n], v2[:n], v3[:n]
	p0, p1, p2, p3 := p[0], p[1], p[2], p[3]
	for i, x := range v0 {
		o[i] += x*p0 + v1[i]*p1 + (v2[i]*p2 + v3[i]*p3)
	}
}

// Add1 computes o += p*v.
func Add1[F cpu.Real](o []F, p F, v []F) {
	v = v[:len(o)]
	for i := range o {
		o[i] += p * v[i]
	}
}

// Maximum returns the largest element of s: -Inf for an empty s, NaN if there is a NaN.
func Maximum[F cpu.Real](s []F) F {
	m := F(math.Inf(-1))
	for _, x := range s {
		m = max(m, x)
	}
	return m
}
