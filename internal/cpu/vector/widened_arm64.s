//go:build gc && !noasm

// Written by hand. Sixteen elements are widened at a time, and the last ones of a row again with those before them.

#include "textflag.h"

// Instructions that the Go assembler has no name for: see neon_arm64.h of internal/cpu/linear.
#define vector3(op, m, n, d) WORD $((op) | (m)<<16 | (n)<<5 | (d))
#define fmul(m, n, d) vector3(0x6E20DC00, m, n, d)    // fmul   vd.4s, vn.4s, vm.4s
#define scvtf(n, d) vector3(0x4E21D800, 0, n, d)      // scvtf  vd.4s, vn.4s
#define fcvtl(n, d) vector3(0x0E217800, 0, n, d)      // fcvtl  vd.4s, vn.4h
#define fcvtl2(n, d) vector3(0x4E217800, 0, n, d)     // fcvtl2 vd.4s, vn.8h
#define sxtl8by7(n, d) vector3(0x0F0FA400, 0, n, d)   // sshll  vd.8h, vn.8b, #7
#define sxtl8hby7(n, d) vector3(0x4F0FA400, 0, n, d)  // sshll2 vd.8h, vn.16b, #7
#define sxtl8(n, d) vector3(0x0F08A400, 0, n, d)      // sxtl   vd.8h, vn.8b
#define sxtl8h(n, d) vector3(0x4F08A400, 0, n, d)     // sxtl2  vd.8h, vn.16b
#define sxtl16(n, d) vector3(0x0F10A400, 0, n, d)     // sxtl   vd.4s, vn.4h
#define sxtl16h(n, d) vector3(0x4F10A400, 0, n, d)    // sxtl2  vd.4s, vn.8h
#define bic14(d) WORD $(0x6F02B400 | (d))             // bic    vd.8h, #64, lsl #8
#define add16(m, n, d) vector3(0x4E608400, m, n, d)   // add    vd.8h, vn.8h, vm.8h
#define cmeq16(m, n, d) vector3(0x6E608C00, m, n, d)  // cmeq   vd.8h, vn.8h, vm.8h
#define cmeq8(m, n, d) vector3(0x6E208C00, m, n, d)   // cmeq   vd.16b, vn.16b, vm.16b
#define orr(m, n, d) vector3(0x4EA01C00, m, n, d)     // orr    vd.16b, vn.16b, vm.16b
#define dup(n, d) vector3(0x4E040400, 0, n, d)        // dup    vd.4s, vn.s[0]
#define movi16by8(x, d) WORD $(0x4F00A400 | ((x)>>5)<<16 | ((x)&31)<<5 | (d)) // movi vd.8h, #x, lsl #8
#define movi8(x, d) WORD $(0x4F00E400 | ((x)>>5)<<16 | ((x)&31)<<5 | (d))     // movi vd.16b, #x

// half makes float16, times 2^-8, of eight numbers of E4M3 in d, whose bytes are shifted up by 7 with their sign in all higher bits.
// Without bit 14 that is a float16. All bits of NaN are on.
#define half(d) \
	bic14(d) \
	add16(d, d, 3) \
	cmeq16(29, 3, 3) \
	orr(3, d, d)

// e4m3 widens the bytes in V0 to V4 to V7.
#define e4m3 \
	sxtl8by7(0, 1) \
	sxtl8hby7(0, 2) \
	half(1) \
	half(2) \
	fcvtl(1, 4) \
	fcvtl2(1, 5) \
	fcvtl(2, 6) \
	fcvtl2(2, 7) \
	fmul(30, 4, 4) \
	fmul(30, 5, 5) \
	fmul(30, 6, 6) \
	fmul(30, 7, 7)

// int8 is e4m3 for integers, of which -128 is NaN.
#define int8 \
	cmeq8(29, 0, 3) \
	sxtl8(0, 1) \
	sxtl8h(0, 2) \
	sxtl16(1, 4) \
	sxtl16h(1, 5) \
	sxtl16(2, 6) \
	sxtl16h(2, 7) \
	scvtf(4, 4) \
	scvtf(5, 5) \
	scvtf(6, 6) \
	scvtf(7, 7) \
	sxtl8(3, 1) \
	sxtl8h(3, 2) \
	sxtl16(1, 16) \
	sxtl16h(1, 17) \
	sxtl16(2, 18) \
	sxtl16h(2, 19) \
	orr(16, 4, 4) \
	orr(17, 5, 5) \
	orr(18, 6, 6) \
	orr(19, 7, 7)

// widened is the function of a type.
#define widened(convert) \
	MOVD dst+0(FP), R0 \
	MOVD src+8(FP), R1 \
	MOVD scales+16(FP), R2 \
	MOVD rows+24(FP), R3 \
	MOVD n+32(FP), R4 \
	MOVD step+40(FP), R5 \
	LSL  $2, R5 \
nextRow: \
	FMOVS (R2), F31 \
	ADD  R5, R2 \
	dup(31, 31) \
	SUBS $16, R4, R6 \
	BLT  single \
next: \
	VLD1.P 16(R1), [V0.B16] \
	convert \
	fmul(31, 4, 4) \
	fmul(31, 5, 5) \
	fmul(31, 6, 6) \
	fmul(31, 7, 7) \
	VST1.P [V4.S4, V5.S4, V6.S4, V7.S4], 64(R0) \
	SUBS $16, R6 \
	BGE  next \
	ADDS $16, R6 \
	BEQ  rowEnd \
	SUB  $16, R6, R7 \
	ADD  R7, R1 \
	ADD  R7<<2, R0 \
	MOVD $0, R6 \
	B    next \
single: \
	MOVD R4, R6 \
one: \
	MOVBU.P 1(R1), R7 \
	FMOVS R7, F0 \
	convert \
	FMULS F31, F4, F4 \
	FMOVS.P F4, 4(R0) \
	SUB  $1, R6 \
	CBNZ R6, one \
rowEnd: \
	SUB  $1, R3 \
	CBNZ R3, nextRow \
	RET

// func fromE4M3NEON(dst *float32, src *uint8, scales *float32, rows, n, step int)
TEXT ·fromE4M3NEON(SB), NOSPLIT, $0-48
	movi16by8(0x7f, 29)
	FMOVS $256.0, F30
	dup(30, 30)
	widened(e4m3)

// func fromInt8NEON(dst *float32, src *uint8, scales *float32, rows, n, step int)
TEXT ·fromInt8NEON(SB), NOSPLIT, $0-48
	movi8(0x80, 29)
	widened(int8)
