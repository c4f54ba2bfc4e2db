//go:build gc && !noasm

// Kernels that multiply a row of x by rows of blocks of 256 elements, written by hand. First a block's factors of four rows go to the stack:
// a vector for each 32 elements, with a lane for each row. Sums have these lanes, too.

#include "go_asm.h"
#include "textflag.h"
#include "neon_arm64.h"
#include "products_arm64.h"
#include "formats_arm64.h"

// rowK is the function of a format. Rows of weights are at R4 to R7, a group of x at R12, and the factors at R14: those of turned4 and,
// 128 bytes on, of turned20. Sums are in V14, those of minima in V15, and scales and sums of x in V18 and V19.
#define rowK(prepare, factors, first, second, size) \
	MOVD a+0(FP), R0 \
	MOVD blockRowArgs_y(R0), R1 \
	MOVD blockRowArgs_yStep(R0), R2 \
	MOVD blockRowArgs_w(R0), R3 \
	MOVD blockRowArgs_wRow(R0), R9 \
	MOVD blockRowArgs_x(R0), R8 \
	MOVD blockRowArgs_n(R0), R10 \
	MOVD blockRowArgs_sets(R0), R11 \
	LSR  $8, R10 \
	prepare \
nextSet: \
	MOVD R3, R4 \
	ADD  R9, R4, R5 \
	ADD  R9, R5, R6 \
	ADD  R9, R6, R7 \
	ADD  R9, R7, R3 \
	MOVD R8, R12 \
	MOVD R10, R13 \
	zero(14) \
	zero(15) \
nextBlock: \
	factors(4, 0) \
	factors(5, 1) \
	factors(6, 2) \
	factors(7, 3) \
	MOVD $turned-256(SP), R14 \
	nextst4(14, 4) \
	nextst4(14, 8) \
	nextst4(14, 20) \
	nextst4(14, 24) \
	SUB  $256, R14 \
	ldp(xGroup_scales, 12, 18, 19) \
	first \
	ADD  $xGroup__size, R12 \
	ldp(xGroup_scales, 12, 18, 19) \
	second \
	ADD  $xGroup__size, R12 \
	ADD  $(size), R4 \
	ADD  $(size), R5 \
	ADD  $(size), R6 \
	ADD  $(size), R7 \
	SUB  $1, R13 \
	CBNZ R13, nextBlock \
	fadd(15, 14, 14) \
	VST1 V14.S[0], (R1) \
	ADD  R2, R1 \
	VST1 V14.S[1], (R1) \
	ADD  R2, R1 \
	VST1 V14.S[2], (R1) \
	ADD  R2, R1 \
	VST1 V14.S[3], (R1) \
	ADD  R2, R1 \
	SUB  $1, R11 \
	CBNZ R11, nextSet \
	RET

// factorsK are those of Q4_K and Q5_K: scales, and then minima.
#define factorsK(w, s) \
	ldq(0, w, 0) \
	sixBits(0, 4+(s), 8+(s), 20+(s), 24+(s))

// pair adds the products of blocks b and b+1 of a group, which are runs 2 j and 2 j + 1. stream(w, d, e) makes sums of a row's products,
// with x in V0 and V1, and in V12 and V13.
#define pair(b, j, stream) \
	ldp(32*(b), 12, 0, 1) \
	ldp(32*(b)+32, 12, 12, 13) \
	stream(4, 4, 8) \
	stream(5, 5, 9) \
	stream(6, 6, 10) \
	stream(7, 7, 11) \
	add4(4) \
	add4(8) \
	scvtf(4, 4) \
	scvtf(8, 8) \
	ldp(32*(j), 14, 20, 21) \
	ldp(128+32*(j), 14, 22, 23) \
	fmulby(b, 18, 20, 20) \
	fmulby((b)+1, 18, 21, 21) \
	fmul(20, 4, 4) \
	fmul(21, 8, 8) \
	fadd(4, 14, 14) \
	fadd(8, 14, 14) \
	fmulby(b, 19, 22, 22) \
	fmulby((b)+1, 19, 23, 23) \
	fadd(22, 15, 15) \
	fadd(23, 15, 15)

#define streamQ4K(products, j, w, d, e) \
	ldp(16+32*(j), w, 2, 3) \
	nibbles(2, 16, 2) \
	nibbles(3, 17, 3) \
	products(16, 17, 0, 1, 26, d) \
	products(2, 3, 12, 13, 26, e)

#define q4k0(w, d, e) streamQ4K(products, 0, w, d, e)
#define q4k1(w, d, e) streamQ4K(products, 1, w, d, e)
#define q4k2(w, d, e) streamQ4K(products, 2, w, d, e)
#define q4k3(w, d, e) streamQ4K(products, 3, w, d, e)
#define firstQ4K \
	pair(0, 0, q4k0) \
	pair(2, 1, q4k1)
#define secondQ4K \
	pair(0, 2, q4k2) \
	pair(2, 3, q4k3)

// func rowQ4KNEON(a *blockRowArgs)
TEXT ·rowQ4KNEON(SB), NOSPLIT, $256-8
	rowK(constants4(16), factorsK, firstQ4K, secondQ4K, 144)

#define dotQ4K0(w, d, e) streamQ4K(productsDot, 0, w, d, e)
#define dotQ4K1(w, d, e) streamQ4K(productsDot, 1, w, d, e)
#define dotQ4K2(w, d, e) streamQ4K(productsDot, 2, w, d, e)
#define dotQ4K3(w, d, e) streamQ4K(productsDot, 3, w, d, e)
#define firstQ4KDot \
	pair(0, 0, dotQ4K0) \
	pair(2, 1, dotQ4K1)
#define secondQ4KDot \
	pair(0, 2, dotQ4K2) \
	pair(2, 3, dotQ4K3)

// func rowQ4KDot(a *blockRowArgs)
TEXT ·rowQ4KDot(SB), NOSPLIT, $256-8
	rowK(constants4(16), factorsK, firstQ4KDot, secondQ4KDot, 144)

// The fifth bits of run 2 j are moved by first and m, and those of the next by second and n.
#define streamQ5K(products, first, m, second, n, j, w, d, e) \
	ldp(48+32*(j), w, 2, 3) \
	ldp(16, w, 24, 25) \
	nibbles(2, 16, 2) \
	nibbles(3, 17, 3) \
	first(m, 24, 30) \
	first(m, 25, 31) \
	fifthOf(30, 16) \
	fifthOf(31, 17) \
	second(n, 24, 24) \
	second(n, 25, 25) \
	fifthOf(24, 2) \
	fifthOf(25, 3) \
	products(16, 17, 0, 1, 26, d) \
	products(2, 3, 12, 13, 26, e)

#define q5k0(w, d, e) streamQ5K(products, up, 4, up, 3, 0, w, d, e)
#define q5k1(w, d, e) streamQ5K(products, up, 2, up, 1, 1, w, d, e)
#define q5k2(w, d, e) streamQ5K(products, up, 0, down, 1, 2, w, d, e)
#define q5k3(w, d, e) streamQ5K(products, down, 2, down, 3, 3, w, d, e)
#define firstQ5K \
	pair(0, 0, q5k0) \
	pair(2, 1, q5k1)
#define secondQ5K \
	pair(0, 2, q5k2) \
	pair(2, 3, q5k3)

// func rowQ5KNEON(a *blockRowArgs)
TEXT ·rowQ5KNEON(SB), NOSPLIT, $256-8
	rowK(constants4(16), factorsK, firstQ5K, secondQ5K, 176)

#define dotQ5K0(w, d, e) streamQ5K(productsDot, up, 4, up, 3, 0, w, d, e)
#define dotQ5K1(w, d, e) streamQ5K(productsDot, up, 2, up, 1, 1, w, d, e)
#define dotQ5K2(w, d, e) streamQ5K(productsDot, up, 0, down, 1, 2, w, d, e)
#define dotQ5K3(w, d, e) streamQ5K(productsDot, down, 2, down, 3, 3, w, d, e)
#define firstQ5KDot \
	pair(0, 0, dotQ5K0) \
	pair(2, 1, dotQ5K1)
#define secondQ5KDot \
	pair(0, 2, dotQ5K2) \
	pair(2, 3, dotQ5K3)

// func rowQ5KDot(a *blockRowArgs)
TEXT ·rowQ5KDot(SB), NOSPLIT, $256-8
	rowK(constants4(16), factorsK, firstQ5KDot, secondQ5KDot, 176)

// factorsQ6K are scales of first halves of blocks, and then of second halves.
#define factorsQ6K(w, s) \
	ldq(192, w, 0) \
	ldh(208, w, 1) \
	scalesQ6K(0, 1, 4+(s), 20+(s), 8+(s), 24+(s))

// blockQ6K adds the products of block b of half h of a block.
#define blockQ6K(b, h, stream) \
	ldp(32*(b), 12, 0, 1) \
	stream(h, 4, 4, 8) \
	stream(h, 5, 5, 9) \
	stream(h, 6, 6, 10) \
	stream(h, 7, 7, 11) \
	add4(4) \
	add4(8) \
	scvtf(4, 4) \
	scvtf(8, 8) \
	ldq(64*(h)+16*(b), 14, 20) \
	ldq(64*(h)+16*(b)+128, 14, 21) \
	fmulby(b, 18, 20, 20) \
	fmulby(b, 18, 21, 21) \
	fmul(20, 4, 4) \
	fmul(21, 8, 8) \
	fadd(8, 14, 14) \
	fadd(4, 14, 14)

// streamQ6K has the lower bits off bytes into a half, moved by low and k, and the upper bits by high and m.
#define streamQ6K(half, off, low, k, high, m, h, w, d, e) \
	ldp(64*(h)+(off), w, 2, 3) \
	ldp(128+32*(h), w, 24, 25) \
	low(k, 2, 2) \
	low(k, 3, 3) \
	high(m, 24, 24) \
	high(m, 25, 25) \
	sixthOf(24, 2) \
	sixthOf(25, 3) \
	sub8(29, 2, 2) \
	sub8(29, 3, 3) \
	half(2, 0, 26, d) \
	half(3, 1, 26, e)

#define q6k0(h, w, d, e) streamQ6K(half, 0, and, 28, up, 4, h, w, d, e)
#define q6k1(h, w, d, e) streamQ6K(half, 32, and, 28, up, 2, h, w, d, e)
#define q6k2(h, w, d, e) streamQ6K(half, 0, down, 4, stay, 0, h, w, d, e)
#define q6k3(h, w, d, e) streamQ6K(half, 32, down, 4, down, 2, h, w, d, e)
#define halfQ6K(h) \
	blockQ6K(0, h, q6k0) \
	blockQ6K(1, h, q6k1) \
	blockQ6K(2, h, q6k2) \
	blockQ6K(3, h, q6k3)

// func rowQ6KNEON(a *blockRowArgs)
TEXT ·rowQ6KNEON(SB), NOSPLIT, $256-8
	rowK(constants6, factorsQ6K, halfQ6K(0), halfQ6K(1), 210)

#define dotQ6K0(h, w, d, e) streamQ6K(halfDot, 0, and, 28, up, 4, h, w, d, e)
#define dotQ6K1(h, w, d, e) streamQ6K(halfDot, 32, and, 28, up, 2, h, w, d, e)
#define dotQ6K2(h, w, d, e) streamQ6K(halfDot, 0, down, 4, stay, 0, h, w, d, e)
#define dotQ6K3(h, w, d, e) streamQ6K(halfDot, 32, down, 4, down, 2, h, w, d, e)
#define halfQ6KDot(h) \
	blockQ6K(0, h, dotQ6K0) \
	blockQ6K(1, h, dotQ6K1) \
	blockQ6K(2, h, dotQ6K2) \
	blockQ6K(3, h, dotQ6K3)

// func rowQ6KDot(a *blockRowArgs)
TEXT ·rowQ6KDot(SB), NOSPLIT, $256-8
	rowK(constants6, factorsQ6K, halfQ6KDot(0), halfQ6KDot(1), 210)
