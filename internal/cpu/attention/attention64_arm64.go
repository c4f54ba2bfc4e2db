//go:build gc && !noasm

package attention

// score64NEON computes, for r < rows, c < count:
//
//	s[r*stride+c] = sum_i q[r*dim+i] k_c[i]   (i < dim)
//
// where k_c is at k[c%4] + at + c/4*step. s is written up to c = ceil(count/4)*4. rows and count are at least 1, dim is
// a multiple of 4.
//
//go:noescape
func score64NEON(s, q *float64, k *Streams, at, rows, count, dim, stride, step int)

// weigh64NEON computes, for r < rows, c < n, i < dim, with top = max(m[r], max_c s[r*stride+c]):
//
//	s[r*stride+c] = 4^(s[r*stride+c]-top)
//	o[r*dim+i] *= 4^(m[r]-top)
//	l[r] = 4^(m[r]-top) l[r] + sum_c s[r*stride+c]
//	m[r] = top
//
// A row whose top is -Inf is left unchanged. weigh returns the number of such rows. rows and n are at least 1, dim is a
// multiple of 4.
//
//go:noescape
func weigh64NEON(s, o, m, l *float64, rows, n, stride, dim int) (empty int)

// weighted64NEON computes, for r < rows, i < dim:
//
//	o[r*dim+i] += sum_c p[r*stride+c] v_c[i]   (c < count)
//
// where v_c is at v[c%4] + at + c/4*step. Keys are added in order. rows is at least 1, dim is a multiple of 4.
//
//go:noescape
func weighted64NEON(o, p *float64, v *Streams, at, rows, count, dim, stride, step int)
