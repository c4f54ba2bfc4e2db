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

// dotF16x1NEON is dotF32x1NEON for weights that are stored as float16.
//
//go:noescape
func dotF16x1NEON(a *dotArgs)

// dotF16x2NEON is dotF32x2NEON for weights that are stored as float16.
//
//go:noescape
func dotF16x2NEON(a *dotArgs)

// dotF16x3NEON is dotF32x3NEON for weights that are stored as float16.
//
//go:noescape
func dotF16x3NEON(a *dotArgs)

// dotBF16x1NEON is dotF32x1NEON for weights that are stored as bfloat16.
//
//go:noescape
func dotBF16x1NEON(a *dotArgs)

// dotBF16x2NEON is dotF32x2NEON for weights that are stored as bfloat16.
//
//go:noescape
func dotBF16x2NEON(a *dotArgs)

// dotBF16x3NEON is dotF32x3NEON for weights that are stored as bfloat16.
//
//go:noescape
func dotBF16x3NEON(a *dotArgs)
