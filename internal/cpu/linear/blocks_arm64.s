//go:build gc && !noasm

// Kernels for groups of weights of 8 and fewer bits, written by hand. Integers are in the order of the row. A vector that goes to sums has
// one block of four output features, so that sums add up block after block, as in Go.

#include "go_asm.h"
#include "textflag.h"
#include "neon_arm64.h"
#include "products_arm64.h"

// turn makes, of the vectors a, b, c and d of four output features, the vectors of four blocks in V24 to V27.
#define turn(a, b, c, d) \
	trn1(b, a, 28) \
	trn2(b, a, 29) \
	trn1(d, c, 30) \
	trn2(d, c, 31) \
	trn1d(30, 28, 24) \
	trn1d(31, 29, 25) \
	trn2d(30, 28, 26) \
	trn2d(31, 29, 27)

// addAll adds the four blocks of turn to the sums in s.
#define addAll(s) \
	fadd(24, s, s) \
	fadd(25, s, s) \
	fadd(26, s, s) \
	fadd(27, s, s)

// The groups of x are in V0 to V7, their scales in V20 and their sums in V21. rowOf makes in p the terms of a group of the weights at Rw.
#define rowOf(products, w, p) \
	ldp(0, w, 24, 25) \
	products(24, 25, 0, 1, 26, 12) \
	ldp(32, w, 24, 25) \
	products(24, 25, 2, 3, 26, 13) \
	ldp(64, w, 24, 25) \
	products(24, 25, 4, 5, 26, 14) \
	ldp(96, w, 24, 25) \
	products(24, 25, 6, 7, 26, 15) \
	add4(12) \
	scvtf(12, 12) \
	ldq(weightGroup_scales, w, 24) \
	fmul(20, 24, 24) \
	fmul(24, 12, p)

// minimaOf makes in p those of the minima.
#define minimaOf(w, p) \
	ldq(weightGroup_minima, w, 24) \
	fmul(21, 24, p)

// halfOf makes in p the terms of halves of blocks, of which the weights' integers are off bytes on and x in x0, x1, x2 and x3.
#define halfOf(half, off, factors, w, x0, x1, x2, x3, p) \
	ldq(off, w, 24) \
	half(24, x0, 26, 12) \
	ldq(32+(off), w, 24) \
	half(24, x1, 26, 13) \
	ldq(64+(off), w, 24) \
	half(24, x2, 26, 14) \
	ldq(96+(off), w, 24) \
	half(24, x3, 26, 15) \
	add4(12) \
	scvtf(12, 12) \
	ldq(factors, w, 24) \
	fmul(20, 24, 24) \
	fmul(24, 12, p)

#define plainGroup(products, half) \
	rowOf(products, 8, 8) \
	rowOf(products, 9, 9) \
	rowOf(products, 10, 10) \
	rowOf(products, 11, 11) \
	turn(8, 9, 10, 11) \
	addAll(16)

#define minimaGroup(products, half) \
	plainGroup(products, half) \
	minimaOf(8, 8) \
	minimaOf(9, 9) \
	minimaOf(10, 10) \
	minimaOf(11, 11) \
	turn(8, 9, 10, 11) \
	addAll(17)

// The second half of a block is added before the first.
#define lowerHalf(half, w, p) halfOf(half, 0, weightGroup_scales, w, 0, 2, 4, 6, p)
#define upperHalf(half, w, p) halfOf(half, 16, weightGroup_high, w, 1, 3, 5, 7, p)
#define halvesGroup(products, half) \
	upperHalf(half, 8, 8) \
	upperHalf(half, 9, 9) \
	upperHalf(half, 10, 10) \
	upperHalf(half, 11, 11) \
	turn(8, 9, 10, 11) \
	VMOV V24.B16, V18.B16 \
	VMOV V25.B16, V19.B16 \
	VMOV V26.B16, V22.B16 \
	VMOV V27.B16, V23.B16 \
	lowerHalf(half, 8, 8) \
	lowerHalf(half, 9, 9) \
	lowerHalf(half, 10, 10) \
	lowerHalf(half, 11, 11) \
	turn(8, 9, 10, 11) \
	fadd(18, 16, 16) \
	fadd(24, 16, 16) \
	fadd(19, 16, 16) \
	fadd(25, 16, 16) \
	fadd(22, 16, 16) \
	fadd(26, 16, 16) \
	fadd(23, 16, 16) \
	fadd(27, 16, 16)

// oneRow is the function of a kind. The weights of the set are at R1, its streams at R8 to R11, x at R12, y at R6.
#define oneRow(group, products, half) \
	MOVD a+0(FP), R0 \
	MOVD groupArgs_w(R0), R1 \
	MOVD groupArgs_wRow(R0), R2 \
	MOVD groupArgs_x(R0), R3 \
	MOVD groupArgs_groups(R0), R4 \
	MOVD groupArgs_sets(R0), R5 \
	MOVD groupArgs_y(R0), R6 \
	MOVD groupArgs_yStep(R0), R7 \
nextSet: \
	MOVD R1, R8 \
	ADD  R2, R8, R9 \
	ADD  R2, R9, R10 \
	ADD  R2, R10, R11 \
	ADD  R2, R11, R1 \
	MOVD R3, R12 \
	MOVD R4, R13 \
	zero(16) \
	zero(17) \
nextGroup: \
	ldp(0, 12, 0, 1) \
	ldp(32, 12, 2, 3) \
	ldp(64, 12, 4, 5) \
	ldp(96, 12, 6, 7) \
	ldp(xGroup_scales, 12, 20, 21) \
	group(products, half) \
	ADD  $weightGroup__size, R8 \
	ADD  $weightGroup__size, R9 \
	ADD  $weightGroup__size, R10 \
	ADD  $weightGroup__size, R11 \
	ADD  $xGroup__size, R12 \
	SUB  $1, R13 \
	CBNZ R13, nextGroup \
	fadd(17, 16, 16) \
	VST1 V16.S[0], (R6) \
	ADD  R7, R6 \
	VST1 V16.S[1], (R6) \
	ADD  R7, R6 \
	VST1 V16.S[2], (R6) \
	ADD  R7, R6 \
	VST1 V16.S[3], (R6) \
	ADD  R7, R6 \
	SUB  $1, R5 \
	CBNZ R5, nextSet \
	RET

// func oneNEON(a *groupArgs)
TEXT ·oneNEON(SB), NOSPLIT, $0-8
	oneRow(plainGroup, products, half)

// func oneMinimaNEON(a *groupArgs)
TEXT ·oneMinimaNEON(SB), NOSPLIT, $0-8
	oneRow(minimaGroup, products, half)

// func oneHalvesNEON(a *groupArgs)
TEXT ·oneHalvesNEON(SB), NOSPLIT, $0-8
	oneRow(halvesGroup, products, half)

// func oneDot(a *groupArgs)
TEXT ·oneDot(SB), NOSPLIT, $0-8
	oneRow(plainGroup, productsDot, halfDot)

// func oneMinimaDot(a *groupArgs)
TEXT ·oneMinimaDot(SB), NOSPLIT, $0-8
	oneRow(minimaGroup, productsDot, halfDot)

// func oneHalvesDot(a *groupArgs)
TEXT ·oneHalvesDot(SB), NOSPLIT, $0-8
	oneRow(halvesGroup, productsDot, halfDot)

// larger makes the larger ones of the absolute values of vectors a and b in d.
#define larger(a, b, d) \
	fabs(a, 16) \
	fabs(b, 17) \
	umax(17, 16, d)

// rounded makes integers of x, of which V17 has the factor.
#define rounded(x) \
	fmulby(0, 17, x, x) \
	fcvtns(x, x)

// func roundNEON(a *roundArgs)
//
// The group is at R1, its block's integers at R4 and its scale at R5.
TEXT ·roundNEON(SB), NOSPLIT, $0-8
	MOVD  a+0(FP), R0
	MOVD  roundArgs_dst(R0), R1
	MOVD  roundArgs_src(R0), R2
	MOVD  roundArgs_n(R0), R3
	LSR   $5, R3
	MOVD  $0x7f800000, R8  // infinity
	MOVD  $0x03800000, R9  // 2^-120
	MOVD  $0x42fe0000, R10 // 127
	FMOVS R10, F30
	MOVD  $0x7fc00000, R10 // NaN
	zero(31)
nextGroup:
	MOVD  R1, R4
	ADD   $xGroup_scales, R1, R5
	MOVD  $4, R6
nextBlock:
	CBZ   R3, nothing
	nextp(2, 0, 1)
	nextp(2, 2, 3)
	nextp(2, 4, 5)
	nextp(2, 6, 7)
	larger(0, 1, 18)
	larger(2, 3, 19)
	larger(4, 5, 20)
	larger(6, 7, 21)
	umax(19, 18, 18)
	umax(21, 20, 20)
	umax(20, 18, 18)
	umaxv(18, 18)
	FMOVS F18, R7
	SUB   $1, R3
	CMPW  R8, R7
	BHS   odd
	CMPW  R9, R7
	BLO   nothing
	FDIVS F18, F30, F17 // 127 / largest
	FDIVS F30, F18, F18 // the scale
	rounded(0)
	rounded(1)
	rounded(2)
	rounded(3)
	rounded(4)
	rounded(5)
	rounded(6)
	rounded(7)
	add(1, 0, 16)
	add(3, 2, 19)
	add(5, 4, 20)
	add(7, 6, 21)
	add(19, 16, 16)
	add(21, 20, 20)
	add(20, 16, 16)
	addv(16, 16)
	scvtf(16, 16)
	FMULS F18, F16, F16
	uzp1h(1, 0, 0)
	uzp1h(3, 2, 2)
	uzp1h(5, 4, 4)
	uzp1h(7, 6, 6)
	uzp1b(2, 0, 0)
	uzp1b(6, 4, 4)
	stp(0, 4, 0, 4)
	FMOVS F18, (R5)
	FMOVS F16, 16(R5)
	B     written
odd:
	MOVW  R10, (R5)
	MOVW  R10, 16(R5)
	B     zeros
nothing:
	MOVW  ZR, (R5)
	MOVW  ZR, 16(R5)
zeros:
	stp(0, 4, 31, 31)
written:
	ADD   $32, R4
	ADD   $4, R5
	SUB   $1, R6
	CBNZ  R6, nextBlock
	ADD   $xGroup__size, R1
	CBNZ  R3, nextGroup
	RET

// sixteen makes in V4 to V7 the numbers of the integers in v, times element i of V16, or of V17.
#define sixteen(v, i, by) \
	sxtl8(v, 2) \
	sxtl8h(v, 3) \
	sxtl16(2, 4) \
	sxtl16h(2, 5) \
	sxtl16(3, 6) \
	sxtl16h(3, 7) \
	scvtf(4, 4) \
	scvtf(5, 5) \
	scvtf(6, 6) \
	scvtf(7, 7) \
	fmulby(i, by, 4, 4) \
	fmulby(i, by, 5, 5) \
	fmulby(i, by, 6, 6) \
	fmulby(i, by, 7, 7)

#define expandPlain(i, off) \
	ldp(off, 5, 0, 1) \
	sixteen(0, i, 16) \
	stp(4*(off), 6, 4, 5) \
	stp(4*(off)+32, 6, 6, 7) \
	sixteen(1, i, 16) \
	stp(4*(off)+64, 6, 4, 5) \
	stp(4*(off)+96, 6, 6, 7)

#define expandHalves(i, off) \
	ldp(off, 5, 0, 1) \
	sixteen(0, i, 16) \
	stp(4*(off), 6, 4, 5) \
	stp(4*(off)+32, 6, 6, 7) \
	sixteen(1, i, 17) \
	stp(4*(off)+64, 6, 4, 5) \
	stp(4*(off)+96, 6, 6, 7)

#define plus18 \
	fadd(18, 4, 4) \
	fadd(18, 5, 5) \
	fadd(18, 6, 6) \
	fadd(18, 7, 7)

#define expandMinima(i, off) \
	ldp(off, 5, 0, 1) \
	dup(i, 17, 18) \
	sixteen(0, i, 16) \
	plus18 \
	stp(4*(off), 6, 4, 5) \
	stp(4*(off)+32, 6, 6, 7) \
	sixteen(1, i, 16) \
	plus18 \
	stp(4*(off)+64, 6, 4, 5) \
	stp(4*(off)+96, 6, 6, 7)

// expanded is the function of a kind. V17 has the factors that are second bytes into a group.
#define expanded(block, second) \
	MOVD a+0(FP), R0 \
	MOVD expandArgs_dst(R0), R1 \
	MOVD expandArgs_dstRow(R0), R2 \
	MOVD expandArgs_src(R0), R3 \
	MOVD expandArgs_srcRow(R0), R4 \
	MOVD expandArgs_rows(R0), R7 \
	MOVD expandArgs_groups(R0), R8 \
nextRow: \
	MOVD R3, R5 \
	MOVD R1, R6 \
	MOVD R8, R9 \
nextGroup: \
	ldq(weightGroup_scales, 5, 16) \
	ldq(second, 5, 17) \
	block(0, 0) \
	block(1, 32) \
	block(2, 64) \
	block(3, 96) \
	ADD  $weightGroup__size, R5 \
	ADD  $512, R6 \
	SUB  $1, R9 \
	CBNZ R9, nextGroup \
	ADD  R4, R3 \
	ADD  R2, R1 \
	SUB  $1, R7 \
	CBNZ R7, nextRow \
	RET

// func expandNEON(a *expandArgs)
TEXT ·expandNEON(SB), NOSPLIT, $0-8
	expanded(expandPlain, weightGroup_scales)

// func expandMinimaNEON(a *expandArgs)
TEXT ·expandMinimaNEON(SB), NOSPLIT, $0-8
	expanded(expandMinima, weightGroup_minima)

// func expandHalvesNEON(a *expandArgs)
TEXT ·expandHalvesNEON(SB), NOSPLIT, $0-8
	expanded(expandHalves, weightGroup_high)
