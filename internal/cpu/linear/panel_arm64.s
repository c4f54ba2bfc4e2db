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

#define two(f, b) \
	f(b, 0) \
	f(b, 1)

#define four(f, b) \
	two(f, b) \
	f(b, 2) \
	f(b, 3)

#define plainBlock(all, b) \
	weights(b) \
	all(rowOf, b)

#define minimaBlock(all, b) \
	plainBlock(all, b) \
	ldq(576+16*(b), 15, 14) \
	all(minimaOf, b)

#define halvesBlock(all, b) \
	weights(b) \
	ldq(576+16*(b), 15, 11) \
	all(halvesOf, b)

// Partial sums of row r are at R(19+r), and its results at R(23+r).
#define factorsOf(b, r) ldp(xGroup_scales, 9+(r), 24+(r), 28+(r))
#define clear(b, r) \
	zero(16+(r)) \
	zero(20+(r))
#define fetch(b, r) \
	ldq(0, 19+(r), 16+(r)) \
	ldq(const_panelPartial/2, 19+(r), 20+(r))
#define keep(b, r) \
	stq(0, 19+(r), 16+(r)) \
	stq(const_panelPartial/2, 19+(r), 20+(r))
#define result(b, r) \
	fadd(20+(r), 16+(r), 16+(r)) \
	stq(0, 23+(r), 16+(r))

// behind makes b the address step bytes behind a if there are more than r rows, and else a: the last row is computed again.
#define behind(r, step, a, b) \
	CMP  $(r), R6 \
	CSEL GT, step, ZR, R7 \
	ADD  R7, a, b

#define pointers(step, a, b, c, d) \
	behind(1, step, a, b) \
	behind(2, step, b, c) \
	behind(3, step, c, d)

// move adds by to the addresses of four rows of x, and moveOut to those of partial sums and results.
#define move(op, by) \
	op by, R9 \
	op by, R10 \
	op by, R11 \
	op by, R12

#define moveOut(by) \
	ADD by, R19 \
	ADD by, R20 \
	ADD by, R21 \
	ADD by, R22 \
	ADD by, R23 \
	ADD by, R24 \
	ADD by, R25 \
	ADD by, R26

// sets multiplies four or two rows by the sets at R13, which R14 counts. R17 counts groups. R8 has the bytes of the groups of a row of x.
#define sets(all, block, nextSet, more, nextGroup, unfinished, setEnd) \
nextSet: \
	MOVD R13, R15 \
	MOVD R3, R17 \
	MOVD panelArgs_more(R0), R1 \
	CBNZ R1, more \
	all(clear, 0) \
	B    nextGroup \
more: \
	all(fetch, 0) \
nextGroup: \
	all(factorsOf, 0) \
	block(all, 0) \
	block(all, 1) \
	block(all, 2) \
	block(all, 3) \
	move(ADD, $xGroup__size) \
	ADD  $const_panelBytes, R15 \
	SUB  $1, R17 \
	CBNZ R17, nextGroup \
	move(SUB, R8) \
	ADD  $const_setBytes, R13 \
	MOVD panelArgs_unfinished(R0), R1 \
	CBNZ R1, unfinished \
	all(result, 0) \
	B    setEnd \
unfinished: \
	all(keep, 0) \
setEnd: \
	moveOut($16) \
	SUB  $1, R14 \
	CBNZ R14, nextSet

// panel is the function of a kind. One row that is left, or two, have a loop of their own.
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
	pointers(R1, R23, R24, R25, R26) \
	MOVD panelArgs_w(R0), R13 \
	MOVD $4, R14 \
	CMP  $2, R6 \
	BLE  nextSet2 \
	sets(four, block, nextSet, more, nextGroup, unfinished, setEnd) \
	SUBS $4, R6 \
	BLE  done \
	MOVD panelArgs_xRow(R0), R1 \
	ADD  R1, R12, R9 \
	ADD  $(const_panelPartial-64), R22, R19 \
	MOVD panelArgs_yRow(R0), R1 \
	ADD  R1, R26, R23 \
	SUB  $64, R23 \
	B    nextRows \
done: \
	RET \
	sets(two, block, nextSet2, more2, nextGroup2, unfinished2, setEnd2) \
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
