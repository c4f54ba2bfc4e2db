//go:build gc && !noasm

// Written by hand, as attention_arm64.s is. Sums of eight neighbouring terms are vectors of their own, two for each
// row and stream: one would leave the multipliers waiting for a single row, and more than three rows have no room.

#include "go_asm.h"
#include "textflag.h"
#include "neon_arm64.h"

// Row r and stream s have their sums in V(8r+s) and V(8r+4+s). The arguments are at R0, streams of weights at R4 to
// R7, rows of x at R9 to R11, and R2 counts the terms that are left.
#define open \
	MOVD a+0(FP), R0 \
	MOVD dotArgs_w(R0), R4 \
	MOVD dotArgs_wStep(R0), R1 \
	ADD  R1, R4, R5 \
	ADD  R1, R5, R6 \
	ADD  R1, R6, R7 \
	MOVD dotArgs_x(R0), R9 \
	MOVD dotArgs_xRow(R0), R1 \
	ADD  R1, R9, R10 \
	ADD  R1, R10, R11 \
	MOVD dotArgs_n(R0), R2 \
	MOVD dotArgs_more(R0), R3 \
	MOVD dotArgs_partial(R0), R8

// weights loads four terms' weights, weight one's: the other lanes are 0.
#define weights \
	VLD1.P 16(R4), [V24.S4] \
	VLD1.P 16(R5), [V25.S4] \
	VLD1.P 16(R6), [V26.S4] \
	VLD1.P 16(R7), [V27.S4]

#define weight \
	FMOVS.P 4(R4), F24 \
	FMOVS.P 4(R5), F25 \
	FMOVS.P 4(R6), F26 \
	FMOVS.P 4(R7), F27

// The same of 16-bit weights. The last one is alone in its vector, too.
#define widened(load, widen) \
	load(4, 24) \
	load(5, 25) \
	load(6, 26) \
	load(7, 27) \
	widen(24, 24) \
	widen(25, 25) \
	widen(26, 26) \
	widen(27, 27)

#define weightsF16 widened(nextd, fcvtl)
#define weightF16 widened(nexth, fcvtl)
#define weightsBF16 widened(nextd, shll16)
#define weightBF16 widened(nexth, shll16)

// products adds those of the weights and a row's numbers, in x, to the sums from s on.
#define products(x, s) \
	fmla(x, 24, (s)+0) \
	fmla(x, 25, (s)+1) \
	fmla(x, 26, (s)+2) \
	fmla(x, 27, (s)+3)

// sums makes of a row's sums, from s on, a vector of the four streams'.
#define sums(s) \
	fadd((s)+4, (s)+0, (s)+0) \
	fadd((s)+5, (s)+1, (s)+1) \
	fadd((s)+6, (s)+2, (s)+2) \
	fadd((s)+7, (s)+3, (s)+3) \
	faddp((s)+1, (s)+0, (s)+0) \
	faddp((s)+3, (s)+2, (s)+2) \
	faddp((s)+2, (s)+0, (s)+0)

// result stores a row's four sums, from s on, which are in v, at R1, and goes on to the next row.
#define result(s, v) \
	sums(s) \
	ADD    R3, R1, R4 \
	VST1.P v.S[0], (R1)(R2) \
	VST1.P v.S[1], (R1)(R2) \
	VST1.P v.S[2], (R1)(R2) \
	VST1.P v.S[3], (R1)(R2) \
	MOVD   R4, R1

// Half of a row's sums: made 0, fetched from R8, or kept there.
#define clear(a, b, c, d) \
	VEOR a.B16, a.B16, a.B16 \
	VEOR b.B16, b.B16, b.B16 \
	VEOR c.B16, c.B16, c.B16 \
	VEOR d.B16, d.B16, d.B16

#define fetch(a, b, c, d) \
	VLD1.P 64(R8), [a.S4, b.S4, c.S4, d.S4]

#define keep(a, b, c, d) \
	VST1.P [a.S4, b.S4, c.S4, d.S4], 64(R8)

// Every step of a row after those of the rows before it.
#define all1(f) \
	f(V0, V1, V2, V3) \
	f(V4, V5, V6, V7)

#define all2(f) \
	all1(f) \
	f(V8, V9, V10, V11) \
	f(V12, V13, V14, V15)

#define all3(f) \
	all2(f) \
	f(V16, V17, V18, V19) \
	f(V20, V21, V22, V23)

#define numbers1 \
	VLD1.P 16(R9), [V28.S4]

#define numbers2 \
	numbers1 \
	VLD1.P 16(R10), [V29.S4]

#define numbers3 \
	numbers2 \
	VLD1.P 16(R11), [V30.S4]

#define number1 \
	FMOVS.P 4(R9), F28

#define number2 \
	number1 \
	FMOVS.P 4(R10), F29

#define number3 \
	number2 \
	FMOVS.P 4(R11), F30

// products of all rows, with the first or (s is 4) the other half of their sums.
#define products1(s) \
	products(28, (s)+0)

#define products2(s) \
	products1(s) \
	products(29, (s)+8)

#define products3(s) \
	products2(s) \
	products(30, (s)+16)

#define results1 \
	result(0, V0)

#define results2 \
	results1 \
	result(8, V8)

#define results3 \
	results2 \
	result(16, V16)

// dot is the function for as many rows as its arguments are of.
#define dot(all, weights, weight, numbers, number, products, results) \
	open \
	CBNZ R3, more \
	all(clear) \
	B    begun \
more: \
	all(fetch) \
begun: \
	SUBS $8, R2 \
	BLT  rest \
eight: \
	weights \
	numbers \
	products(0) \
	weights \
	numbers \
	products(4) \
	SUBS $8, R2 \
	BGE  eight \
rest: \
	ADDS $8, R2 \
	BEQ  done \
	SUBS $4, R2 \
	BLT  less \
	weights \
	numbers \
	products(0) \
	BEQ  done \
	B    one \
less: \
	ADD  $4, R2 \
one: \
	weight \
	number \
	products(0) \
	SUBS $1, R2 \
	BNE  one \
done: \
	MOVD dotArgs_unfinished(R0), R3 \
	CBNZ R3, leave \
	MOVD dotArgs_y(R0), R1 \
	MOVD dotArgs_yStep(R0), R2 \
	MOVD dotArgs_yRow(R0), R3 \
	results \
	RET \
leave: \
	MOVD dotArgs_partial(R0), R8 \
	all(keep) \
	RET

// func dotF32x1NEON(a *dotArgs)
TEXT ·dotF32x1NEON(SB), NOSPLIT, $0-8
	dot(all1, weights, weight, numbers1, number1, products1, results1)

// func dotF32x2NEON(a *dotArgs)
TEXT ·dotF32x2NEON(SB), NOSPLIT, $0-8
	dot(all2, weights, weight, numbers2, number2, products2, results2)

// func dotF32x3NEON(a *dotArgs)
TEXT ·dotF32x3NEON(SB), NOSPLIT, $0-8
	dot(all3, weights, weight, numbers3, number3, products3, results3)

// func dotF16x1NEON(a *dotArgs)
TEXT ·dotF16x1NEON(SB), NOSPLIT, $0-8
	dot(all1, weightsF16, weightF16, numbers1, number1, products1, results1)

// func dotF16x2NEON(a *dotArgs)
TEXT ·dotF16x2NEON(SB), NOSPLIT, $0-8
	dot(all2, weightsF16, weightF16, numbers2, number2, products2, results2)

// func dotF16x3NEON(a *dotArgs)
TEXT ·dotF16x3NEON(SB), NOSPLIT, $0-8
	dot(all3, weightsF16, weightF16, numbers3, number3, products3, results3)

// func dotBF16x1NEON(a *dotArgs)
TEXT ·dotBF16x1NEON(SB), NOSPLIT, $0-8
	dot(all1, weightsBF16, weightBF16, numbers1, number1, products1, results1)

// func dotBF16x2NEON(a *dotArgs)
TEXT ·dotBF16x2NEON(SB), NOSPLIT, $0-8
	dot(all2, weightsBF16, weightBF16, numbers2, number2, products2, results2)

// func dotBF16x3NEON(a *dotArgs)
TEXT ·dotBF16x3NEON(SB), NOSPLIT, $0-8
	dot(all3, weightsBF16, weightBF16, numbers3, number3, products3, results3)

// Weights of E4M3 become float32 by way of float16, whose fraction begins with the same bits: with bits 14 off, a byte times 2^7 is a
// float16 times 2^-8. V31 has the scales of the four streams times 2^8.

// narrow widens eight weights in V24, of stream s, to V24 and V25. narrower does so for at most four.
#define narrower(s) \
	sxtl8by7(24, 24) \
	bic14(24) \
	fcvtl(24, 24) \
	fmulby(s, 31, 24, 24)

#define narrow(s) \
	sxtl8by7(24, 24) \
	bic14(24) \
	fcvtl2(24, 25) \
	fcvtl(24, 24) \
	fmulby(s, 31, 24, 24) \
	fmulby(s, 31, 25, 25)

// eight1 and eight2 add eight products of one or two rows, whose numbers are in V26 and V27, and in V28 and V29.
#define eight1(w, s) \
	nextd(w, 24) \
	narrow(s) \
	fmla(26, 24, s) \
	fmla(27, 25, 4+(s))

#define eight2(w, s) \
	eight1(w, s) \
	fmla(28, 24, 8+(s)) \
	fmla(29, 25, 12+(s))

#define few1(load, w, s) \
	load(w, 24) \
	narrower(s) \
	fmla(26, 24, s)

#define few2(load, w, s) \
	few1(load, w, s) \
	fmla(28, 24, 8+(s))

#define wide1 nextp(9, 26, 27)
#define wide2 \
	wide1 \
	nextp(10, 28, 29)

#define next1(load) load(9, 26)
#define next2(load) \
	next1(load) \
	load(10, 28)

// rowsE4M3 is the function for one row or two. R3 counts the terms of a group of one scale, and R19 those behind it.
#define rowsE4M3(all, wide, eightOf, next, few, results) \
	MOVD a+0(FP), R0 \
	MOVD blockRowArgs_y(R0), R17 \
	MOVD blockRowArgs_w(R0), R12 \
	MOVD blockRowArgs_wRow(R0), R16 \
	MOVD blockRowArgs_sets(R0), R11 \
	MOVD blockRowArgs_scales(R0), R20 \
	MOVD blockRowArgs_scaleRow(R0), R15 \
	FMOVS $256.0, F30 \
nextSet: \
	MOVD R12, R4 \
	ADD  R16, R4, R5 \
	ADD  R16, R5, R6 \
	ADD  R16, R6, R7 \
	ADD  R16, R7, R12 \
	MOVD blockRowArgs_x(R0), R9 \
	MOVD blockRowArgs_xRow(R0), R1 \
	ADD  R1, R9, R10 \
	MOVD R20, R13 \
	all(clear) \
	MOVD blockRowArgs_n(R0), R19 \
nextGroup: \
	MOVD R13, R14 \
	FMOVS (R14), F31 \
	ADD  R15, R14 \
	VLD1 (R14), V31.S[1] \
	ADD  R15, R14 \
	VLD1 (R14), V31.S[2] \
	ADD  R15, R14 \
	VLD1 (R14), V31.S[3] \
	fmulby(0, 30, 31, 31) \
	ADD  $4, R13 \
	MOVD blockRowArgs_group(R0), R3 \
	CMP  R3, R19 \
	CSEL LT, R19, R3, R3 \
	SUB  R3, R19 \
	SUBS $8, R3 \
	BLT  rest \
eight: \
	wide \
	eightOf(4, 0) \
	eightOf(5, 1) \
	eightOf(6, 2) \
	eightOf(7, 3) \
	SUBS $8, R3 \
	BGE  eight \
rest: \
	ADDS $8, R3 \
	BEQ  groupEnd \
	SUBS $4, R3 \
	BLT  less \
	next(nextq) \
	few(nexts, 4, 0) \
	few(nexts, 5, 1) \
	few(nexts, 6, 2) \
	few(nexts, 7, 3) \
	CBZ  R3, groupEnd \
	B    one \
less: \
	ADD  $4, R3 \
one: \
	next(nexts) \
	few(nextb, 4, 0) \
	few(nextb, 5, 1) \
	few(nextb, 6, 2) \
	few(nextb, 7, 3) \
	SUBS $1, R3 \
	BNE  one \
groupEnd: \
	CBNZ R19, nextGroup \
	MOVD R17, R1 \
	MOVD blockRowArgs_yStep(R0), R2 \
	MOVD blockRowArgs_yRow(R0), R3 \
	results \
	ADD  R2<<2, R17 \
	ADD  R15<<2, R20 \
	SUB  $1, R11 \
	CBNZ R11, nextSet \
	RET

// func rowsE4M3x1NEON(a *blockRowArgs)
TEXT ·rowsE4M3x1NEON(SB), NOSPLIT, $0-8
	rowsE4M3(all1, wide1, eight1, next1, few1, results1)

// func rowsE4M3x2NEON(a *blockRowArgs)
TEXT ·rowsE4M3x2NEON(SB), NOSPLIT, $0-8
	rowsE4M3(all2, wide2, eight2, next2, few2, results2)
