//go:build gc && !noasm

// Kernels for panels, written by hand. The four rows of weights of a set take turns, four bytes each: one instruction multiplies them by
// the same four bytes of x, and no sum has to be added up across lanes.

#include "go_asm.h"
#include "textflag.h"
#include "neon_arm64.h"

// integers and, for other numbers, nextst4 have the rows take turns at R1 with four bytes each.
#define integers(off) \
	ldp(off, 4, 0, 4) \
	ldp(off, 5, 1, 5) \
	ldp(off, 6, 2, 6) \
	ldp(off, 7, 3, 7) \
	nextst4(1, 0) \
	nextst4(1, 4)

// func interleaveNEON(a *interleaveArgs)
TEXT ·interleaveNEON(SB), NOSPLIT, $0-8
	MOVD a+0(FP), R0
	MOVD interleaveArgs_dst(R0), R1
	MOVD interleaveArgs_src(R0), R4
	MOVD interleaveArgs_srcRow(R0), R2
	MOVD interleaveArgs_second(R0), R3
	MOVD interleaveArgs_groups(R0), R8
	ADD  R2, R4, R5
	ADD  R2, R5, R6
	ADD  R2, R6, R7
nextGroup:
	integers(0)
	integers(32)
	integers(64)
	integers(96)
	ldq(weightGroup_scales, 4, 0)
	ldq(weightGroup_scales, 5, 1)
	ldq(weightGroup_scales, 6, 2)
	ldq(weightGroup_scales, 7, 3)
	nextst4(1, 0)
	ADD  R3, R4, R9
	ldq(0, 9, 0)
	ADD  R3, R5, R9
	ldq(0, 9, 1)
	ADD  R3, R6, R9
	ldq(0, 9, 2)
	ADD  R3, R7, R9
	ldq(0, 9, 3)
	nextst4(1, 0)
	ADD  $(const_panelBytes-const_setBytes), R1
	ADD  $weightGroup__size, R4
	ADD  $weightGroup__size, R5
	ADD  $weightGroup__size, R6
	ADD  $weightGroup__size, R7
	SUB  $1, R8
	CBNZ R8, nextGroup
	RET

// Up to four rows of x, at R9 to R12, are multiplied by a set at a time. Sums of row r are in V(16+r), and their second sums in V(20+r):
// those of minima. A block's integers are in V0 to V7, those of x in V12 and V13, and scales and sums of x in V(24+r) and V(28+r).

#define four(f) \
	f(0) \
	f(1) \
	f(2) \
	f(3)

// firstHalf and secondHalf make products of half a block of row r in d.
#define firstHalf(d) \
	sdotby(0, 12, 0, d) \
	sdotby(1, 12, 1, d) \
	sdotby(2, 12, 2, d) \
	sdotby(3, 12, 3, d)

#define secondHalf(d) \
	sdotby(0, 13, 4, d) \
	sdotby(1, 13, 5, d) \
	sdotby(2, 13, 6, d) \
	sdotby(3, 13, 7, d)

// times adds the integers d, times the factors of the weights in w and the scales of x, to the sums of row r.
#define times(b, r, w, d) \
	scvtf(d, d) \
	fmulby(b, 24+(r), w, 15) \
	fmul(15, d, d) \
	fadd(d, 16+(r), 16+(r))

#define rowOf(b, r) \
	ldp(32*(b), 9+(r), 12, 13) \
	zero(8+(r)) \
	firstHalf(8+(r)) \
	secondHalf(8+(r)) \
	times(b, r, 14, 8+(r))

#define minimaOf(b, r) \
	fmulby(b, 28+(r), 14, 15) \
	fadd(15, 20+(r), 20+(r))

// Scales of the second half are in V11.
#define halvesOf(b, r) \
	ldp(32*(b), 9+(r), 12, 13) \
	zero(8) \
	zero(9) \
	firstHalf(8) \
	secondHalf(9) \
	times(b, r, 11, 9) \
	times(b, r, 14, 8)

#define weights(b) \
	ldp(128*(b), 15, 0, 1) \
	ldp(128*(b)+32, 15, 2, 3) \
	ldp(128*(b)+64, 15, 4, 5) \
	ldp(128*(b)+96, 15, 6, 7) \
	ldq(512+16*(b), 15, 14)

#define plainBlock(b) \
	weights(b) \
	rowOf(b, 0) \
	rowOf(b, 1) \
	rowOf(b, 2) \
	rowOf(b, 3)

#define minimaBlock(b) \
	plainBlock(b) \
	ldq(576+16*(b), 15, 14) \
	minimaOf(b, 0) \
	minimaOf(b, 1) \
	minimaOf(b, 2) \
	minimaOf(b, 3)

#define halvesBlock(b) \
	weights(b) \
	ldq(576+16*(b), 15, 11) \
	halvesOf(b, 0) \
	halvesOf(b, 1) \
	halvesOf(b, 2) \
	halvesOf(b, 3)

#define factorsOf(r) ldp(xGroup_scales, 9+(r), 24+(r), 28+(r))
#define clear(r) \
	zero(16+(r)) \
	zero(20+(r))
// Partial sums of row r are at R(19+r), its results at R(23+r), but for R2 in place of R26.
#define fetch(r) \
	ldq(0, 19+(r), 16+(r)) \
	ldq(const_panelPartial/2, 19+(r), 20+(r))
#define keep(r) \
	stq(0, 19+(r), 16+(r)) \
	stq(const_panelPartial/2, 19+(r), 20+(r))
#define sum(r) fadd(20+(r), 16+(r), 16+(r))

// behind makes b the address step bytes behind a if there are more than r rows, and else a: the last row is computed again.
#define behind(r, step, a, b) \
	CMP  $(r), R6 \
	CSEL GT, step, ZR, R7 \
	ADD  R7, a, b

#define pointers(step, a, b, c, d) \
	behind(1, step, a, b) \
	behind(2, step, b, c) \
	behind(3, step, c, d)

// panel is the function of a kind. R14 counts sets, R17 groups. R8 has the bytes of the groups of a row of x.
#define panel(block) \
	MOVD a+0(FP), R0 \
	MOVD panelArgs_rows(R0), R6 \
	MOVD panelArgs_groups(R0), R8 \
	MOVD panelArgs_half(R0), R1 \
	CMP  $0, R1 \
	CSET NE, R1 \
	ADD  R1, R8 \
	MOVD R8, R3 \
	MOVD $xGroup__size, R1 \
	MUL  R1, R8 \
	MOVD panelArgs_x(R0), R9 \
	MOVD panelArgs_partial(R0), R19 \
	MOVD panelArgs_y(R0), R23 \
nextRows: \
	MOVD panelArgs_xRow(R0), R1 \
	pointers(R1, R9, R10, R11, R12) \
	MOVD $const_panelPartial, R1 \
	pointers(R1, R19, R20, R21, R22) \
	MOVD panelArgs_yRow(R0), R1 \
	pointers(R1, R23, R24, R25, R2) \
	MOVD panelArgs_w(R0), R13 \
	MOVD $4, R14 \
nextSet: \
	MOVD R13, R15 \
	MOVD R3, R17 \
	MOVD panelArgs_more(R0), R1 \
	CBNZ R1, more \
	four(clear) \
	B    nextGroup \
more: \
	four(fetch) \
nextGroup: \
	four(factorsOf) \
	block(0) \
	block(1) \
	block(2) \
	block(3) \
	ADD  $xGroup__size, R9 \
	ADD  $xGroup__size, R10 \
	ADD  $xGroup__size, R11 \
	ADD  $xGroup__size, R12 \
	ADD  $const_panelBytes, R15 \
	SUB  $1, R17 \
	CBNZ R17, nextGroup \
	SUB  R8, R9 \
	SUB  R8, R10 \
	SUB  R8, R11 \
	SUB  R8, R12 \
	ADD  $const_setBytes, R13 \
	MOVD panelArgs_unfinished(R0), R1 \
	CBNZ R1, unfinished \
	four(sum) \
	stq(0, 23, 16) \
	stq(0, 24, 17) \
	stq(0, 25, 18) \
	stq(0, 2, 19) \
	B    setEnd \
unfinished: \
	four(keep) \
setEnd: \
	ADD  $16, R19 \
	ADD  $16, R20 \
	ADD  $16, R21 \
	ADD  $16, R22 \
	ADD  $16, R23 \
	ADD  $16, R24 \
	ADD  $16, R25 \
	ADD  $16, R2 \
	SUB  $1, R14 \
	CBNZ R14, nextSet \
	SUBS $4, R6 \
	BLE  done \
	MOVD panelArgs_xRow(R0), R1 \
	ADD  R1, R12, R9 \
	ADD  $(const_panelPartial-64), R22, R19 \
	MOVD panelArgs_yRow(R0), R1 \
	ADD  R1, R2, R23 \
	SUB  $64, R23 \
	B    nextRows \
done: \
	RET

// func panelDot(a *panelArgs)
TEXT ·panelDot(SB), NOSPLIT, $0-8
	panel(plainBlock)

// func panelMinimaDot(a *panelArgs)
TEXT ·panelMinimaDot(SB), NOSPLIT, $0-8
	panel(minimaBlock)

// func panelHalvesDot(a *panelArgs)
TEXT ·panelHalvesDot(SB), NOSPLIT, $0-8
	panel(halvesBlock)
