//go:build gc && !noasm

// Written by hand, as linear_arm64.s is: the sums of eight rows and eight features, two vectors a row, stay in
// registers. Where there are fewer rows, the last one is computed again and not written.

#include "go_asm.h"
#include "textflag.h"

// Instructions that the Go assembler has no name for: see neon_arm64.h of internal/cpu/attention.
#define vector3(op, m, n, d) WORD $((op) | (m)<<16 | (n)<<5 | (d))
#define fadd(m, n, d) vector3(0x4E20D400, m, n, d) // fadd  vd.4s, vn.4s, vm.4s
// fmla vd.4s, vn.4s, vm.s[i]: d + n times element i of m
#define fmlaby(i, m, n, d) vector3(0x4F801000 | ((i)&1)<<21 | ((i)>>1)<<11, m, n, d)

// Row r has its sums in V(2r) and V(2r+1) and four of its numbers in V(16+r). Weights are in V24 to V31. The
// arguments are at R0, row r of x at R(4+r), weights at R12, and R2 counts the elements that are left.

// next makes b the row behind a, if there are more than r rows, else a.
#define next(r, a, b) \
	CMP  $(r), R3 \
	CSEL GT, R1, ZR, R13 \
	ADD  R13, a, b

#define numbers \
	VLD1.P 16(R4), [V16.S4] \
	VLD1.P 16(R5), [V17.S4] \
	VLD1.P 16(R6), [V18.S4] \
	VLD1.P 16(R7), [V19.S4] \
	VLD1.P 16(R8), [V20.S4] \
	VLD1.P 16(R9), [V21.S4] \
	VLD1.P 16(R10), [V22.S4] \
	VLD1.P 16(R11), [V23.S4]

#define number \
	FMOVS.P 4(R4), F16 \
	FMOVS.P 4(R5), F17 \
	FMOVS.P 4(R6), F18 \
	FMOVS.P 4(R7), F19 \
	FMOVS.P 4(R8), F20 \
	FMOVS.P 4(R9), F21 \
	FMOVS.P 4(R10), F22 \
	FMOVS.P 4(R11), F23

// row adds the products of row r's number i and the weights of an element, in v and v+1.
#define row(r, i, v) \
	fmlaby(i, 16+(r), v, 2*(r)) \
	fmlaby(i, 16+(r), (v)+1, 2*(r)+1)

#define products(i, v) \
	row(0, i, v) \
	row(1, i, v) \
	row(2, i, v) \
	row(3, i, v) \
	row(4, i, v) \
	row(5, i, v) \
	row(6, i, v) \
	row(7, i, v)

#define clear(a, b, c, d) \
	VEOR a.B16, a.B16, a.B16 \
	VEOR b.B16, b.B16, b.B16 \
	VEOR c.B16, c.B16, c.B16 \
	VEOR d.B16, d.B16, d.B16

// write writes row r, or adds it, and ends behind the last.
#define write(r, a, b) \
	CBZ    R4, 4(PC) \
	VLD1   (R1), [V24.S4, V25.S4] \
	fadd(24, 2*(r), 2*(r)) \
	fadd(25, 2*(r)+1, 2*(r)+1) \
	VST1   [a.S4, b.S4], (R1) \
	ADD    R2, R1 \
	SUBS   $1, R3 \
	BEQ    done

// func tileF32NEON(a *tileArgs)
TEXT ·tileF32NEON(SB), NOSPLIT, $0-8
	MOVD a+0(FP), R0
	MOVD Args_X(R0), R4
	MOVD Args_XRow(R0), R1
	MOVD Args_Rows(R0), R3
	MOVD Args_W(R0), R12
	MOVD Args_N(R0), R2
	next(1, R4, R5)
	next(2, R5, R6)
	next(3, R6, R7)
	next(4, R7, R8)
	next(5, R8, R9)
	next(6, R9, R10)
	next(7, R10, R11)
	clear(V0, V1, V2, V3)
	clear(V4, V5, V6, V7)
	clear(V8, V9, V10, V11)
	clear(V12, V13, V14, V15)
	SUBS $4, R2
	BLT  rest
four:
	numbers
	VLD1.P 64(R12), [V24.S4, V25.S4, V26.S4, V27.S4]
	VLD1.P 64(R12), [V28.S4, V29.S4, V30.S4, V31.S4]
	products(0, 24)
	products(1, 26)
	products(2, 28)
	products(3, 30)
	SUBS $4, R2
	BGE  four
rest:
	ADDS $4, R2
	BEQ  sums
one:
	number
	VLD1.P 32(R12), [V24.S4, V25.S4]
	products(0, 24)
	SUBS $1, R2
	BNE  one
sums:
	MOVD Args_Y(R0), R1
	MOVD Args_YRow(R0), R2
	MOVD Args_More(R0), R4
	write(0, V0, V1)
	write(1, V2, V3)
	write(2, V4, V5)
	write(3, V6, V7)
	write(4, V8, V9)
	write(5, V10, V11)
	write(6, V12, V13)
	write(7, V14, V15)
done:
	RET
