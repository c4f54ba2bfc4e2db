//go:build gc && !noasm

// Kernels that unpack rows of weights, written by hand. Integers are in the order of the row.

#include "go_asm.h"
#include "textflag.h"
#include "neon_arm64.h"
#include "formats_arm64.h"

// unpacked is the function of a format whose units have 32 elements << shift. unit(b) writes block b of a group, and those behind it, of
// the weights at R9. The group's integers are at R5 and its scales at R6.
#define unpacked(prepare, all, unit, shift, rest) \
	MOVD a+0(FP), R0 \
	MOVD unpackArgs_dst(R0), R1 \
	MOVD unpackArgs_dstRow(R0), R2 \
	MOVD unpackArgs_src(R0), R3 \
	MOVD unpackArgs_srcRow(R0), R4 \
	MOVD unpackArgs_rows(R0), R7 \
	MOVD unpackArgs_n(R0), R8 \
	prepare \
	zero(26) \
nextRow: \
	MOVD R1, R5 \
	MOVD R3, R9 \
	LSR  $7, R8, R10 \
	CBZ  R10, tail \
nextGroup: \
	ADD  $weightGroup_scales, R5, R6 \
	all(unit) \
	ADD  $weightGroup__size, R5 \
	SUB  $1, R10 \
	CBNZ R10, nextGroup \
tail: \
	AND  $127, R8, R11 \
	CBZ  R11, rowEnd \
	MOVD $4, R12 \
	ADD  $weightGroup_scales, R5, R6 \
	LSR  $(5+(shift)), R11, R10 \
	CBZ  R10, noUnit \
nextUnit: \
	unit(0) \
	ADD  $(32<<(shift)), R5 \
	ADD  $(4<<(shift)), R6 \
	SUB  $(1<<(shift)), R12 \
	SUB  $1, R10 \
	CBNZ R10, nextUnit \
noUnit: \
	rest \
	CBZ  R12, rowEnd \
nextZero: \
	stp(0, 5, 26, 26) \
	FMOVS F26, (R6) \
	FMOVS F26, 32(R6) \
	ADD  $32, R5 \
	ADD  $4, R6 \
	SUB  $1, R12 \
	CBNZ R12, nextZero \
rowEnd: \
	ADD  R4, R3 \
	ADD  R2, R1 \
	SUB  $1, R7 \
	CBNZ R7, nextRow \
	RET

// store writes the integers in V1 and V2 as block b, and factor a number of 16 bits as its scale, or 32 bytes on as its minimum.
#define store(b) stp(32*(b), 5, 1, 2)
#define factor(off) \
	nexth(9, 0) \
	fcvtsh(0, 0) \
	sts(off, 6, 0)

#define unitI8(b) \
	sts(4*(b), 6, 27) \
	nextp(9, 1, 2) \
	store(b)

// restI8 writes the elements behind the last whole block, of which no byte is read beyond the row.
#define restI8 \
	AND  $31, R11 \
	CBZ  R11, restEnd \
	sts(0, 6, 27) \
	stp(0, 5, 26, 26) \
	MOVD R5, R14 \
nextByte: \
	MOVBU.P 1(R9), R13 \
	MOVB.P  R13, 1(R14) \
	SUB  $1, R11 \
	CBNZ R11, nextByte \
	ADD  $32, R5 \
	ADD  $4, R6 \
	SUB  $1, R12 \
restEnd:

// func unpackI8NEON(a *unpackArgs)
TEXT ·unpackI8NEON(SB), NOSPLIT, $0-8
	unpacked(one32(27), all4, unitI8, 0, restI8)

#define unitQ80(b) \
	factor(4*(b)) \
	nextp(9, 1, 2) \
	store(b)

// func unpackQ80NEON(a *unpackArgs)
TEXT ·unpackQ80NEON(SB), NOSPLIT, $0-8
	unpacked(none, all4, unitQ80, 0, none)

#define unitQ40(b) \
	factor(4*(b)) \
	nextq(9, 0) \
	nibbles(0, 1, 2) \
	sub8(29, 1, 1) \
	sub8(29, 2, 2) \
	store(b)

// func unpackQ40NEON(a *unpackArgs)
TEXT ·unpackQ40NEON(SB), NOSPLIT, $0-8
	unpacked(constants4(8), all4, unitQ40, 0, none)

#define unitQ41(b) \
	factor(4*(b)) \
	factor(4*(b)+weightGroup_minima-weightGroup_scales) \
	nextq(9, 0) \
	nibbles(0, 1, 2) \
	store(b)

// func unpackQ41NEON(a *unpackArgs)
TEXT ·unpackQ41NEON(SB), NOSPLIT, $0-8
	unpacked(constants4(0), all4, unitQ41, 0, none)

#define unitQ50(b) \
	factor(4*(b)) \
	nexts(9, 3) \
	nextq(9, 0) \
	nibbles(0, 1, 2) \
	fifthsBelow(3, 1, 2) \
	store(b)

// func unpackQ50NEON(a *unpackArgs)
TEXT ·unpackQ50NEON(SB), NOSPLIT, $0-8
	unpacked(constants5, all4, unitQ50, 0, none)

#define unitQ51(b) \
	factor(4*(b)) \
	factor(4*(b)+weightGroup_minima-weightGroup_scales) \
	nexts(9, 3) \
	nextq(9, 0) \
	nibbles(0, 1, 2) \
	fifths(3, 1, 2) \
	store(b)

// func unpackQ51NEON(a *unpackArgs)
TEXT ·unpackQ51NEON(SB), NOSPLIT, $0-8
	unpacked(constants5, all4, unitQ51, 0, none)

// zeroed is a block of INT4, whose zeros are in V3.
#define zeroed(b) \
	nextq(9, 0) \
	nibbles(0, 1, 2) \
	sub8(3, 1, 1) \
	sub8(3, 2, 2) \
	store(b)

// headI4 loads the scale and the zero of a group of INT4.
#define headI4 \
	nexth(9, 4) \
	nextb(9, 3) \
	fcvtsh(4, 4) \
	dup8(0, 3, 3)

#define unitI4x32(b) \
	headI4 \
	sts(4*(b), 6, 4) \
	zeroed(b)

// func unpackI4x32NEON(a *unpackArgs)
TEXT ·unpackI4x32NEON(SB), NOSPLIT, $0-8
	unpacked(constants4(0), all4, unitI4x32, 0, none)

#define unitI4x64(b) \
	headI4 \
	sts(4*(b), 6, 4) \
	sts(4*(b)+4, 6, 4) \
	zeroed(b) \
	zeroed((b)+1)

// func unpackI4x64NEON(a *unpackArgs)
TEXT ·unpackI4x64NEON(SB), NOSPLIT, $0-8
	unpacked(constants4(0), all2, unitI4x64, 1, none)

#define unitI4x128(b) \
	headI4 \
	sts(0, 6, 4) \
	sts(4, 6, 4) \
	sts(8, 6, 4) \
	sts(12, 6, 4) \
	zeroed(0) \
	zeroed(1) \
	zeroed(2) \
	zeroed(3)

// func unpackI4x128NEON(a *unpackArgs)
TEXT ·unpackI4x128NEON(SB), NOSPLIT, $0-8
	unpacked(constants4(0), all1, unitI4x128, 2, none)

// unpackedK is the function of a format of blocks of 256 elements, which unit makes two groups of.
#define unpackedK(prepare, unit) \
	MOVD a+0(FP), R0 \
	MOVD unpackArgs_dst(R0), R1 \
	MOVD unpackArgs_dstRow(R0), R2 \
	MOVD unpackArgs_src(R0), R3 \
	MOVD unpackArgs_srcRow(R0), R4 \
	MOVD unpackArgs_rows(R0), R7 \
	MOVD unpackArgs_n(R0), R8 \
	prepare \
nextRow: \
	MOVD R1, R5 \
	MOVD R3, R9 \
	LSR  $8, R8, R10 \
nextBlock: \
	unit \
	ADD  $(2*weightGroup__size), R5 \
	SUB  $1, R10 \
	CBNZ R10, nextBlock \
	ADD  R4, R3 \
	ADD  R2, R1 \
	SUB  $1, R7 \
	CBNZ R7, nextRow \
	RET

// factorsK writes scales and minima of Q4_K or Q5_K.
#define factorsK \
	nextq(9, 0) \
	sixBits(0, 4, 5, 6, 7) \
	stq(weightGroup_scales, 5, 4) \
	stq(weightGroup__size+weightGroup_scales, 5, 5) \
	stq(weightGroup_minima, 5, 6) \
	stq(weightGroup__size+weightGroup_minima, 5, 7)

// pairQ4K writes two runs, those whose integers begin off bytes into the groups.
#define pairQ4K(off) \
	nextp(9, 0, 1) \
	nibbles(0, 2, 4) \
	nibbles(1, 3, 5) \
	stp(off, 5, 2, 3) \
	stp(32+(off), 5, 4, 5)

#define unitQ4K \
	factorsK \
	pairQ4K(0) \
	pairQ4K(64) \
	pairQ4K(weightGroup__size) \
	pairQ4K(weightGroup__size+64)

// func unpackQ4KNEON(a *unpackArgs)
TEXT ·unpackQ4KNEON(SB), NOSPLIT, $0-8
	unpackedK(constants5, unitQ4K)

// pairQ5K is pairQ4K with the fifth bits in V20 and V21 and, of the second run, in V22 and V23.
#define pairQ5K(off) \
	nextp(9, 0, 1) \
	nibbles(0, 2, 4) \
	nibbles(1, 3, 5) \
	fifthOf(20, 2) \
	fifthOf(21, 3) \
	fifthOf(22, 4) \
	fifthOf(23, 5) \
	stp(off, 5, 2, 3) \
	stp(32+(off), 5, 4, 5)

// The bits of 32 integers are in V18 and V19. runsQ5K moves those of two runs to bit 4.
#define runsQ5K(first, i, second, j) \
	first(i, 18, 20) \
	first(i, 19, 21) \
	second(j, 18, 22) \
	second(j, 19, 23)

#define unitQ5K \
	factorsK \
	nextp(9, 18, 19) \
	runsQ5K(up, 4, up, 3) \
	pairQ5K(0) \
	runsQ5K(up, 2, up, 1) \
	pairQ5K(64) \
	runsQ5K(up, 0, down, 1) \
	pairQ5K(weightGroup__size) \
	runsQ5K(down, 2, down, 3) \
	pairQ5K(weightGroup__size+64)

// func unpackQ5KNEON(a *unpackArgs)
TEXT ·unpackQ5KNEON(SB), NOSPLIT, $0-8
	unpackedK(constants5, unitQ5K)

// runQ6K writes 32 integers off bytes into the groups. Their lower bits are in p and q, their upper ones in v and w.
#define runQ6K(v, w, p, q, off) \
	sixthOf(v, p) \
	sixthOf(w, q) \
	sub8(29, p, p) \
	sub8(29, q, q) \
	stp(off, 5, p, q)

// halfQ6K writes a group, off bytes into the groups. Its lower bits are at R9, its upper bits at R11.
#define halfQ6K(off) \
	nextp(9, 0, 1) \
	nextp(9, 2, 3) \
	nextp(11, 18, 19) \
	nibbles(0, 4, 8) \
	nibbles(1, 5, 9) \
	nibbles(2, 6, 10) \
	nibbles(3, 7, 11) \
	shl8(4, 18, 20) \
	shl8(4, 19, 21) \
	runQ6K(20, 21, 4, 5, off) \
	shl8(2, 18, 20) \
	shl8(2, 19, 21) \
	runQ6K(20, 21, 6, 7, 32+(off)) \
	runQ6K(18, 19, 8, 9, 64+(off)) \
	shr8(2, 18, 20) \
	shr8(2, 19, 21) \
	runQ6K(20, 21, 10, 11, 96+(off))

#define unitQ6K \
	ADD  $128, R9, R11 \
	halfQ6K(0) \
	halfQ6K(weightGroup__size) \
	nextq(11, 0) \
	nexth(11, 1) \
	scalesQ6K(0, 1, 4, 5, 6, 7) \
	stq(weightGroup_scales, 5, 4) \
	stq(weightGroup_high, 5, 5) \
	stq(weightGroup__size+weightGroup_scales, 5, 6) \
	stq(weightGroup__size+weightGroup_high, 5, 7) \
	MOVD R11, R9

// func unpackQ6KNEON(a *unpackArgs)
TEXT ·unpackQ6KNEON(SB), NOSPLIT, $0-8
	unpackedK(constants6, unitQ6K)
