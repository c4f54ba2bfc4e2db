//go:build gc && !noasm

package matmul

// tileF32NEON is tileF32Go for eight features and up to eight rows.
//
//go:noescape
func tileF32NEON(a *Args)
