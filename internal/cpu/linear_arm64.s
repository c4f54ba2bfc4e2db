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

// func dotF32x1NEON(a *dotArgs)
TEXT ·dotF32x1NEON(SB), NOSPLIT, $0-8
	open
	CBNZ R3, more
	VEOR V0.B16, V0.B16, V0.B16
	VEOR V1.B16, V1.B16, V1.B16
	VEOR V2.B16, V2.B16, V2.B16
	VEOR V3.B16, V3.B16, V3.B16
	VEOR V4.B16, V4.B16, V4.B16
	VEOR V5.B16, V5.B16, V5.B16
	VEOR V6.B16, V6.B16, V6.B16
	VEOR V7.B16, V7.B16, V7.B16
	B    begun

more:
	VLD1.P 64(R8), [V0.S4, V1.S4, V2.S4, V3.S4]
	VLD1.P 64(R8), [V4.S4, V5.S4, V6.S4, V7.S4]

begun:
	SUBS $8, R2
	BLT  rest

eight:
	weights
	VLD1.P 16(R9), [V28.S4]
	products(28, 0)
	weights
	VLD1.P 16(R9), [V28.S4]
	products(28, 4)
	SUBS   $8, R2
	BGE    eight

rest:
	ADDS $8, R2
	BEQ  done
	SUBS $4, R2
	BLT  less
	weights
	VLD1.P 16(R9), [V28.S4]
	products(28, 0)
	BEQ    done
	B      one

less:
	ADD $4, R2

one:
	weight
	FMOVS.P 4(R9), F28
	products(28, 0)
	SUBS    $1, R2
	BNE     one

done:
	MOVD dotArgs_unfinished(R0), R3
	CBNZ R3, leave
	MOVD dotArgs_y(R0), R1
	MOVD dotArgs_yStep(R0), R2
	sums(0)
	VST1.P V0.S[0], (R1)(R2)
	VST1.P V0.S[1], (R1)(R2)
	VST1.P V0.S[2], (R1)(R2)
	VST1.P V0.S[3], (R1)(R2)
	RET

leave:
	MOVD dotArgs_partial(R0), R8
	VST1.P [V0.S4, V1.S4, V2.S4, V3.S4], 64(R8)
	VST1.P [V4.S4, V5.S4, V6.S4, V7.S4], 64(R8)
	RET

// func dotF32x2NEON(a *dotArgs)
TEXT ·dotF32x2NEON(SB), NOSPLIT, $0-8
	open
	CBNZ R3, more
	VEOR V0.B16, V0.B16, V0.B16
	VEOR V1.B16, V1.B16, V1.B16
	VEOR V2.B16, V2.B16, V2.B16
	VEOR V3.B16, V3.B16, V3.B16
	VEOR V4.B16, V4.B16, V4.B16
	VEOR V5.B16, V5.B16, V5.B16
	VEOR V6.B16, V6.B16, V6.B16
	VEOR V7.B16, V7.B16, V7.B16
	VEOR V8.B16, V8.B16, V8.B16
	VEOR V9.B16, V9.B16, V9.B16
	VEOR V10.B16, V10.B16, V10.B16
	VEOR V11.B16, V11.B16, V11.B16
	VEOR V12.B16, V12.B16, V12.B16
	VEOR V13.B16, V13.B16, V13.B16
	VEOR V14.B16, V14.B16, V14.B16
	VEOR V15.B16, V15.B16, V15.B16
	B    begun

more:
	VLD1.P 64(R8), [V0.S4, V1.S4, V2.S4, V3.S4]
	VLD1.P 64(R8), [V4.S4, V5.S4, V6.S4, V7.S4]
	VLD1.P 64(R8), [V8.S4, V9.S4, V10.S4, V11.S4]
	VLD1.P 64(R8), [V12.S4, V13.S4, V14.S4, V15.S4]

begun:
	SUBS $8, R2
	BLT  rest

eight:
	weights
	VLD1.P 16(R9), [V28.S4]
	VLD1.P 16(R10), [V29.S4]
	products(28, 0)
	products(29, 8)
	weights
	VLD1.P 16(R9), [V28.S4]
	VLD1.P 16(R10), [V29.S4]
	products(28, 4)
	products(29, 12)
	SUBS   $8, R2
	BGE    eight

rest:
	ADDS $8, R2
	BEQ  done
	SUBS $4, R2
	BLT  less
	weights
	VLD1.P 16(R9), [V28.S4]
	VLD1.P 16(R10), [V29.S4]
	products(28, 0)
	products(29, 8)
	BEQ    done
	B      one

less:
	ADD $4, R2

one:
	weight
	FMOVS.P 4(R9), F28
	FMOVS.P 4(R10), F29
	products(28, 0)
	products(29, 8)
	SUBS    $1, R2
	BNE     one

done:
	MOVD dotArgs_unfinished(R0), R3
	CBNZ R3, leave
	MOVD dotArgs_y(R0), R1
	MOVD dotArgs_yStep(R0), R2
	MOVD dotArgs_yRow(R0), R3
	sums(0)
	ADD    R3, R1, R4
	VST1.P V0.S[0], (R1)(R2)
	VST1.P V0.S[1], (R1)(R2)
	VST1.P V0.S[2], (R1)(R2)
	VST1.P V0.S[3], (R1)(R2)
	MOVD   R4, R1
	sums(8)
	VST1.P V8.S[0], (R1)(R2)
	VST1.P V8.S[1], (R1)(R2)
	VST1.P V8.S[2], (R1)(R2)
	VST1.P V8.S[3], (R1)(R2)
	RET

leave:
	MOVD dotArgs_partial(R0), R8
	VST1.P [V0.S4, V1.S4, V2.S4, V3.S4], 64(R8)
	VST1.P [V4.S4, V5.S4, V6.S4, V7.S4], 64(R8)
	VST1.P [V8.S4, V9.S4, V10.S4, V11.S4], 64(R8)
	VST1.P [V12.S4, V13.S4, V14.S4, V15.S4], 64(R8)
	RET

// func dotF32x3NEON(a *dotArgs)
TEXT ·dotF32x3NEON(SB), NOSPLIT, $0-8
	open
	CBNZ R3, more
	VEOR V0.B16, V0.B16, V0.B16
	VEOR V1.B16, V1.B16, V1.B16
	VEOR V2.B16, V2.B16, V2.B16
	VEOR V3.B16, V3.B16, V3.B16
	VEOR V4.B16, V4.B16, V4.B16
	VEOR V5.B16, V5.B16, V5.B16
	VEOR V6.B16, V6.B16, V6.B16
	VEOR V7.B16, V7.B16, V7.B16
	VEOR V8.B16, V8.B16, V8.B16
	VEOR V9.B16, V9.B16, V9.B16
	VEOR V10.B16, V10.B16, V10.B16
	VEOR V11.B16, V11.B16, V11.B16
	VEOR V12.B16, V12.B16, V12.B16
	VEOR V13.B16, V13.B16, V13.B16
	VEOR V14.B16, V14.B16, V14.B16
	VEOR V15.B16, V15.B16, V15.B16
	VEOR V16.B16, V16.B16, V16.B16
	VEOR V17.B16, V17.B16, V17.B16
	VEOR V18.B16, V18.B16, V18.B16
	VEOR V19.B16, V19.B16, V19.B16
	VEOR V20.B16, V20.B16, V20.B16
	VEOR V21.B16, V21.B16, V21.B16
	VEOR V22.B16, V22.B16, V22.B16
	VEOR V23.B16, V23.B16, V23.B16
	B    begun

more:
	VLD1.P 64(R8), [V0.S4, V1.S4, V2.S4, V3.S4]
	VLD1.P 64(R8), [V4.S4, V5.S4, V6.S4, V7.S4]
	VLD1.P 64(R8), [V8.S4, V9.S4, V10.S4, V11.S4]
	VLD1.P 64(R8), [V12.S4, V13.S4, V14.S4, V15.S4]
	VLD1.P 64(R8), [V16.S4, V17.S4, V18.S4, V19.S4]
	VLD1.P 64(R8), [V20.S4, V21.S4, V22.S4, V23.S4]

begun:
	SUBS $8, R2
	BLT  rest

eight:
	weights
	VLD1.P 16(R9), [V28.S4]
	VLD1.P 16(R10), [V29.S4]
	VLD1.P 16(R11), [V30.S4]
	products(28, 0)
	products(29, 8)
	products(30, 16)
	weights
	VLD1.P 16(R9), [V28.S4]
	VLD1.P 16(R10), [V29.S4]
	VLD1.P 16(R11), [V30.S4]
	products(28, 4)
	products(29, 12)
	products(30, 20)
	SUBS   $8, R2
	BGE    eight

rest:
	ADDS $8, R2
	BEQ  done
	SUBS $4, R2
	BLT  less
	weights
	VLD1.P 16(R9), [V28.S4]
	VLD1.P 16(R10), [V29.S4]
	VLD1.P 16(R11), [V30.S4]
	products(28, 0)
	products(29, 8)
	products(30, 16)
	BEQ    done
	B      one

less:
	ADD $4, R2

one:
	weight
	FMOVS.P 4(R9), F28
	FMOVS.P 4(R10), F29
	FMOVS.P 4(R11), F30
	products(28, 0)
	products(29, 8)
	products(30, 16)
	SUBS    $1, R2
	BNE     one

done:
	MOVD dotArgs_unfinished(R0), R3
	CBNZ R3, leave
	MOVD dotArgs_y(R0), R1
	MOVD dotArgs_yStep(R0), R2
	MOVD dotArgs_yRow(R0), R3
	sums(0)
	ADD    R3, R1, R4
	VST1.P V0.S[0], (R1)(R2)
	VST1.P V0.S[1], (R1)(R2)
	VST1.P V0.S[2], (R1)(R2)
	VST1.P V0.S[3], (R1)(R2)
	MOVD   R4, R1
	sums(8)
	ADD    R3, R1, R4
	VST1.P V8.S[0], (R1)(R2)
	VST1.P V8.S[1], (R1)(R2)
	VST1.P V8.S[2], (R1)(R2)
	VST1.P V8.S[3], (R1)(R2)
	MOVD   R4, R1
	sums(16)
	VST1.P V16.S[0], (R1)(R2)
	VST1.P V16.S[1], (R1)(R2)
	VST1.P V16.S[2], (R1)(R2)
	VST1.P V16.S[3], (R1)(R2)
	RET

leave:
	MOVD dotArgs_partial(R0), R8
	VST1.P [V0.S4, V1.S4, V2.S4, V3.S4], 64(R8)
	VST1.P [V4.S4, V5.S4, V6.S4, V7.S4], 64(R8)
	VST1.P [V8.S4, V9.S4, V10.S4, V11.S4], 64(R8)
	VST1.P [V12.S4, V13.S4, V14.S4, V15.S4], 64(R8)
	VST1.P [V16.S4, V17.S4, V18.S4, V19.S4], 64(R8)
	VST1.P [V20.S4, V21.S4, V22.S4, V23.S4], 64(R8)
	RET
