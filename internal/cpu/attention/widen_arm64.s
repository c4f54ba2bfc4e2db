//go:build gc && !noasm

#include "textflag.h"
#include "neon_arm64.h"

#define fcvtl(n, d) vector3(0x0E217800, 0, n, d)   // fcvtl  vd.4s, vn.4h
#define fcvtl2(n, d) vector3(0x4E217800, 0, n, d)  // fcvtl2 vd.4s, vn.8h
#define shll16(n, d) vector3(0x2E613800, 0, n, d)  // shll   vd.4s, vn.4h, #16
#define shll216(n, d) vector3(0x6E613800, 0, n, d) // shll2  vd.4s, vn.8h, #16

#define widened(lower, upper) \
	MOVD dst+0(FP), R0 \
	MOVD src+8(FP), R1 \
	MOVD n+16(FP), R2 \
next: \
	VLD1.P 16(R1), [V0.H8] \
	lower(0, 1) \
	upper(0, 2) \
	VST1.P [V1.S4, V2.S4], 32(R0) \
	SUBS $8, R2 \
	BGT  next \
	RET

// func fromF16NEON(dst *float32, src unsafe.Pointer, n int)
TEXT ·fromF16NEON(SB), NOSPLIT, $0-24
	widened(fcvtl, fcvtl2)

// func fromBF16NEON(dst *float32, src unsafe.Pointer, n int)
TEXT ·fromBF16NEON(SB), NOSPLIT, $0-24
	widened(shll16, shll216)
