//go:build gc && !noasm

package vector

// fromE4M3NEON is fromE4M3Go.
//
//go:noescape
func fromE4M3NEON(dst *float32, src *uint8, scales *float32, rows, n, step int)

// fromInt8NEON is fromInt8Go.
//
//go:noescape
func fromInt8NEON(dst *float32, src *uint8, scales *float32, rows, n, step int)
