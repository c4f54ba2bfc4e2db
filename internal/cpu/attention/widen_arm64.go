//go:build gc && !noasm

package attention

import "unsafe"

// fromF16NEON converts n numbers of float16 to float32. n is a positive multiple of 8.
//
//go:noescape
func fromF16NEON(dst *float32, src unsafe.Pointer, n int)

// fromBF16NEON is fromF16NEON for bfloat16.
//
//go:noescape
func fromBF16NEON(dst *float32, src unsafe.Pointer, n int)
