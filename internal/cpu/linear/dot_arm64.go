//go:build gc && !noasm

package linear

// dotF32x1NEON is
//
//	for r := range a.rows {
//		for s := range 4 {
//			y[r][s] = sum_k x[r][k] * w[s][k], k < a.n
//		}
//	}
//
// for one row and float32 weights, with the contract of dotF32Go. Nothing is fetched ahead.
//
//go:noescape
func dotF32x1NEON(a *dotArgs)

// dotF32x2NEON is dotF32x1NEON for two rows.
//
//go:noescape
func dotF32x2NEON(a *dotArgs)

// dotF32x3NEON is dotF32x1NEON for three rows.
//
//go:noescape
func dotF32x3NEON(a *dotArgs)
