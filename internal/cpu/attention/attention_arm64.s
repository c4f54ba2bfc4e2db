//go:build gc && !noasm

// Written by hand: avo, which makes the other assembly, knows amd64 only. There are no prefetches, whose worth
// would have to be measured on the machines that this is for.

#include "textflag.h"
#include "neon_arm64.h"

// zero clears the sums of four rows.
#define zero16 \
	VEOR V0.B16, V0.B16, V0.B16 \
	VEOR V1.B16, V1.B16, V1.B16 \
	VEOR V2.B16, V2.B16, V2.B16 \
	VEOR V3.B16, V3.B16, V3.B16 \
	VEOR V4.B16, V4.B16, V4.B16 \
	VEOR V5.B16, V5.B16, V5.B16 \
	VEOR V6.B16, V6.B16, V6.B16 \
	VEOR V7.B16, V7.B16, V7.B16 \
	VEOR V8.B16, V8.B16, V8.B16 \
	VEOR V9.B16, V9.B16, V9.B16 \
	VEOR V10.B16, V10.B16, V10.B16 \
	VEOR V11.B16, V11.B16, V11.B16 \
	VEOR V12.B16, V12.B16, V12.B16 \
	VEOR V13.B16, V13.B16, V13.B16 \
	VEOR V14.B16, V14.B16, V14.B16 \
	VEOR V15.B16, V15.B16, V15.B16

// dots adds the products of a row's elements, in q, with those of four keys, in k, k+2, k+4 and k+6, to the
// row's sums, from vector s on.
#define dots(q, k, s) \
	fmla(q, (k)+0, (s)+0) \
	fmla(q, (k)+2, (s)+1) \
	fmla(q, (k)+4, (s)+2) \
	fmla(q, (k)+6, (s)+3)

// sum4 adds up each of the vectors s to s+3, and makes a vector of the four sums, in s.
#define sum4(s) \
	faddp((s)+1, (s)+0, (s)+0) \
	faddp((s)+3, (s)+2, (s)+2) \
	faddp((s)+2, (s)+0, (s)+0)

// func scoreNEON(s, q *float32, k *streams, at, rows, count, dim, stride, step int)
TEXT ·scoreNEON(SB), NOSPLIT, $0-72
	MOVD s+0(FP), R0
	MOVD q+8(FP), R1
	MOVD k+16(FP), R2
	MOVD at+24(FP), R3
	MOVD rows+32(FP), R4
	MOVD count+40(FP), R5   // that are left
	MOVD dim+48(FP), R6
	MOVD stride+56(FP), R7
	MOVD step+64(FP), R8
	LSL  $2, R6             // in bytes from here on
	LSL  $2, R7
	LDP  (R2), (R9, R10)    // the quad's keys
	LDP  16(R2), (R11, R12)
	ADD  R3, R9
	ADD  R3, R10
	ADD  R3, R11
	ADD  R3, R12

quad:
	// For keys that the last quad does not have, the first is read again.
	CMP  $2, R5
	CSEL LT, R9, R10, R10
	CMP  $3, R5
	CSEL LT, R9, R11, R11
	CMP  $4, R5
	CSEL LT, R9, R12, R12

	MOVD R0, R13 // the row's scores
	MOVD R1, R14 // the row
	MOVD R4, R15 // rows that are left
	CMP  $4, R15
	BLT  rest

four:
	zero16
	MOVD R9, R19
	MOVD R10, R20
	MOVD R11, R21
	MOVD R12, R22
	MOVD R14, R23
	ADD  R6, R23, R24
	ADD  R6, R24, R25
	ADD  R6, R25, R26
	MOVD R6, R2

fourDims:
	VLD1.P 32(R19), [V16.S4, V17.S4]
	VLD1.P 32(R20), [V18.S4, V19.S4]
	VLD1.P 32(R21), [V20.S4, V21.S4]
	VLD1.P 32(R22), [V22.S4, V23.S4]
	VLD1.P 32(R23), [V24.S4, V25.S4]
	VLD1.P 32(R24), [V26.S4, V27.S4]
	VLD1.P 32(R25), [V28.S4, V29.S4]
	VLD1.P 32(R26), [V30.S4, V31.S4]
	dots(24, 16, 0)
	dots(26, 16, 4)
	dots(28, 16, 8)
	dots(30, 16, 12)
	dots(25, 17, 0)
	dots(27, 17, 4)
	dots(29, 17, 8)
	dots(31, 17, 12)
	SUBS   $32, R2
	BNE    fourDims

	sum4(0)
	sum4(4)
	sum4(8)
	sum4(12)
	VST1 [V0.S4], (R13)
	ADD  R7, R13
	VST1 [V4.S4], (R13)
	ADD  R7, R13
	VST1 [V8.S4], (R13)
	ADD  R7, R13
	VST1 [V12.S4], (R13)
	ADD  R7, R13
	MOVD R26, R14           // where the fourth row ends
	SUB  $4, R15
	CMP  $4, R15
	BGE  four

rest:
	CBZ R15, next

one:
	// Two vectors of sums for each key: four in all would leave the multipliers waiting for them.
	VEOR V0.B16, V0.B16, V0.B16
	VEOR V1.B16, V1.B16, V1.B16
	VEOR V2.B16, V2.B16, V2.B16
	VEOR V3.B16, V3.B16, V3.B16
	VEOR V4.B16, V4.B16, V4.B16
	VEOR V5.B16, V5.B16, V5.B16
	VEOR V6.B16, V6.B16, V6.B16
	VEOR V7.B16, V7.B16, V7.B16
	MOVD R9, R19
	MOVD R10, R20
	MOVD R11, R21
	MOVD R12, R22
	MOVD R6, R2

oneDims:
	VLD1.P 32(R19), [V16.S4, V17.S4]
	VLD1.P 32(R20), [V18.S4, V19.S4]
	VLD1.P 32(R21), [V20.S4, V21.S4]
	VLD1.P 32(R22), [V22.S4, V23.S4]
	VLD1.P 32(R14), [V24.S4, V25.S4]
	dots(24, 16, 0)
	dots(25, 17, 4)
	SUBS   $32, R2
	BNE    oneDims

	fadd(4, 0, 0)
	fadd(5, 1, 1)
	fadd(6, 2, 2)
	fadd(7, 3, 3)
	sum4(0)
	VST1 [V0.S4], (R13)
	ADD  R7, R13
	SUBS $1, R15
	BNE  one

next:
	ADD  $16, R0
	ADD  R8, R9
	ADD  R8, R10
	ADD  R8, R11
	ADD  R8, R12
	SUBS $4, R5
	BGT  quad
	RET

// What exp4 computes with: see exp4.go.
DATA exp4NEON<>+0(SB)/4, $6291456.0               // shift
DATA exp4NEON<>+4(SB)/4, $-63.0
DATA exp4NEON<>+8(SB)/4, $0.009980593653054077  // c6
DATA exp4NEON<>+12(SB)/4, $0.04290126049902481  // c5
DATA exp4NEON<>+16(SB)/4, $0.15388308759631666   // c4
DATA exp4NEON<>+20(SB)/4, $0.4440248440794375   // c3
DATA exp4NEON<>+24(SB)/4, $0.9609061113150835    // c2
DATA exp4NEON<>+28(SB)/4, $1.3862944299360829     // c1
DATA exp4NEON<>+32(SB)/4, $1.0
GLOBL exp4NEON<>(SB), RODATA|NOPTR, $36

// exp4 replaces the vector x by 4^(x-top), with top in V25 and the constants in V16 to V24. a, b, c and d are
// its own. As exp4 in exp4.go, it has t in a, f in b, and the polynomial in c and d in turn; then 2^n in a. x is
// where the result is 0, which is nowhere for NaN.
#define exp4(x, a, b, c, d) \
	fsub(25, x, x) \
	fadd(16, x, a) \
	fsub(16, a, b) \
	fsub(b, x, b) \
	mov(19, c) \
	fmla(18, b, c) \
	mov(20, d) \
	fmla(c, b, d) \
	mov(21, c) \
	fmla(d, b, c) \
	mov(22, d) \
	fmla(c, b, d) \
	mov(23, c) \
	fmla(d, b, c) \
	mov(24, d) \
	fmla(c, b, d) \
	shl23(a, a) \
	add(24, a, a) \
	fmul(a, d, d) \
	fcmgt(x, 17, x) \
	bic(x, d, x)

// func weighNEON(s, o, m, l *float32, rows, n, stride, dim int) (empty int)
TEXT ·weighNEON(SB), NOSPLIT, $0-72
	MOVD s+0(FP), R0
	MOVD o+8(FP), R1
	MOVD m+16(FP), R2
	MOVD l+24(FP), R3
	MOVD rows+32(FP), R4
	MOVD n+40(FP), R5
	MOVD stride+48(FP), R6
	MOVD dim+56(FP), R7
	LSL  $2, R6            // bytes
	MOVD ZR, R8            // rows that are left as they are
	MOVD $0xFF800000, R9   // -Inf

	MOVD   $exp4NEON<>(SB), R10
	VLD1R.P 4(R10), [V16.S4]
	VLD1R.P 4(R10), [V17.S4]
	VLD1R.P 4(R10), [V18.S4]
	VLD1R.P 4(R10), [V19.S4]
	VLD1R.P 4(R10), [V20.S4]
	VLD1R.P 4(R10), [V21.S4]
	VLD1R.P 4(R10), [V22.S4]
	VLD1R.P 4(R10), [V23.S4]
	VLD1R   (R10), [V24.S4]

row:
	// The maximum of eight numbers at a time, then of one.
	VLD1R (R2), [V0.S4]
	VMOV  V0.B16, V1.B16
	VMOV  V0.B16, V26.B16 // the old one
	MOVD  R0, R10
	SUBS  $8, R5, R11
	BLT   maxRest

maxEight:
	VLD1.P 32(R10), [V2.S4, V3.S4]
	fmax(2, 0, 0)
	fmax(3, 1, 1)
	SUBS   $8, R11
	BGE    maxEight

maxRest:
	ADDS $8, R11
	BEQ  maxDone

maxOne:
	VLD1R.P 4(R10), [V2.S4]
	fmax(2, 0, 0)
	SUBS    $1, R11
	BNE     maxOne

maxDone:
	fmax(1, 0, 0)
	fmaxv(0, 25)
	FMOVS F25, R12
	CMPW  R9, R12
	BEQ   left
	VDUP  V25.S[0], V25.S4

	// The weights and their sum, in the same way.
	VEOR V14.B16, V14.B16, V14.B16
	VEOR V15.B16, V15.B16, V15.B16
	MOVD R0, R10
	SUBS $8, R5, R11
	BLT  expRest

expEight:
	VLD1   (R10), [V0.S4, V1.S4]
	exp4(0, 2, 3, 4, 5)
	exp4(1, 6, 7, 8, 9)
	VST1.P [V0.S4, V1.S4], 32(R10)
	fadd(0, 14, 14)
	fadd(1, 15, 15)
	SUBS   $8, R11
	BGE    expEight

expRest:
	ADDS $8, R11
	fadd(15, 14, 14)
	faddp(14, 14, 14)
	faddp(14, 14, 14)
	BEQ  expDone

expOne:
	FMOVS   (R10), F0
	exp4(0, 2, 3, 4, 5)
	FMOVS.P F0, 4(R10)
	FADDS   F0, F14, F14
	SUBS    $1, R11
	BNE     expOne

expDone:
	// What the row has is scaled, unless it has nothing, or the maximum is still the same. (That may be +Inf,
	// of which no factor could be computed.)
	FMOVS (R3), F1
	FMOVS F26, R12
	CMPW  R9, R12
	BEQ   scaled
	FCMPS F25, F26
	BEQ   scaled
	VMOV  V26.B16, V0.B16
	exp4(0, 2, 3, 4, 5)
	FMULS F0, F1, F1
	MOVD  R1, R10
	MOVD  R7, R11

scale:
	VLD1   (R10), [V2.S4, V3.S4]
	fmul(0, 2, 2)
	fmul(0, 3, 3)
	VST1.P [V2.S4, V3.S4], 32(R10)
	SUBS   $8, R11
	BNE    scale

scaled:
	FADDS F14, F1, F1
	FMOVS F1, (R3)
	FMOVS F25, (R2)
	B     next

left:
	ADD $1, R8

next:
	ADD  R6, R0
	ADD  R7<<2, R1
	ADD  $4, R2
	ADD  $4, R3
	SUBS $1, R4
	BNE  row
	MOVD R8, empty+64(FP)
	RET

// by16 adds 16 elements of a value, in v to v+3, times the rows' weights i, in V16 to V19, to V0 to V15.
#define by16(i, v) \
	fmlaby(i, 16, (v)+0, 0) \
	fmlaby(i, 16, (v)+1, 1) \
	fmlaby(i, 16, (v)+2, 2) \
	fmlaby(i, 16, (v)+3, 3) \
	fmlaby(i, 17, (v)+0, 4) \
	fmlaby(i, 17, (v)+1, 5) \
	fmlaby(i, 17, (v)+2, 6) \
	fmlaby(i, 17, (v)+3, 7) \
	fmlaby(i, 18, (v)+0, 8) \
	fmlaby(i, 18, (v)+1, 9) \
	fmlaby(i, 18, (v)+2, 10) \
	fmlaby(i, 18, (v)+3, 11) \
	fmlaby(i, 19, (v)+0, 12) \
	fmlaby(i, 19, (v)+1, 13) \
	fmlaby(i, 19, (v)+2, 14) \
	fmlaby(i, 19, (v)+3, 15)

// by8 is by16 for 8 elements, and V0 to V7.
#define by8(i, v) \
	fmlaby(i, 16, (v)+0, 0) \
	fmlaby(i, 16, (v)+1, 1) \
	fmlaby(i, 17, (v)+0, 2) \
	fmlaby(i, 17, (v)+1, 3) \
	fmlaby(i, 18, (v)+0, 4) \
	fmlaby(i, 18, (v)+1, 5) \
	fmlaby(i, 19, (v)+0, 6) \
	fmlaby(i, 19, (v)+1, 7)

// open makes R19 to R22 where the values of the four streams at R2 begin, offset bytes into them.
#define open(offset) \
	LDP  (R2), (R19, R20) \
	LDP  16(R2), (R21, R22) \
	ADD  offset, R19 \
	ADD  offset, R20 \
	ADD  offset, R21 \
	ADD  offset, R22

// openWeights makes R23 to R26 where the weights of four rows begin.
#define openWeights \
	MOVD R1, R23 \
	ADD  R7, R23, R24 \
	ADD  R7, R24, R25 \
	ADD  R7, R25, R26

// loadWeights loads the weights of a quad in four rows.
#define loadWeights \
	VLD1.P 16(R23), [V16.S4] \
	VLD1.P 16(R24), [V17.S4] \
	VLD1.P 16(R25), [V18.S4] \
	VLD1.P 16(R26), [V19.S4]

// func weightedNEON(o, p *float32, v *streams, at, rows, count, dim, stride, step int)
TEXT ·weightedNEON(SB), NOSPLIT, $0-72
	MOVD o+0(FP), R0
	MOVD p+8(FP), R1
	MOVD v+16(FP), R2
	MOVD at+24(FP), R3
	MOVD rows+32(FP), R4
	MOVD count+40(FP), R5
	MOVD dim+48(FP), R6
	MOVD stride+56(FP), R7
	MOVD step+64(FP), R8
	LSL  $2, R6            // bytes
	LSL  $2, R7            // bytes
	LSR  $2, R5            // quads
	CBZ  R5, tail

	// Four rows: their sums in columns of 16 elements, or 8, stay in registers while all keys go by.
	CMP $4, R4
	BLT rest

four:
	MOVD R6, R9 // bytes that are left
	MOVD R3, R10
	CMP  $64, R9
	BLT  eight

sixteen:
	MOVD R0, R11
	VLD1 (R11), [V0.S4, V1.S4, V2.S4, V3.S4]
	ADD  R6, R11
	VLD1 (R11), [V4.S4, V5.S4, V6.S4, V7.S4]
	ADD  R6, R11
	VLD1 (R11), [V8.S4, V9.S4, V10.S4, V11.S4]
	ADD  R6, R11
	VLD1 (R11), [V12.S4, V13.S4, V14.S4, V15.S4]
	open(R10)
	openWeights
	MOVD R5, R12

sixteenQuad:
	loadWeights
	VLD1.P (R19)(R8), [V20.S4, V21.S4, V22.S4, V23.S4]
	VLD1.P (R20)(R8), [V24.S4, V25.S4, V26.S4, V27.S4]
	VLD1.P (R21)(R8), [V28.S4, V29.S4, V30.S4, V31.S4]
	by16(0, 20)
	VLD1.P (R22)(R8), [V20.S4, V21.S4, V22.S4, V23.S4]
	by16(1, 24)
	by16(2, 28)
	by16(3, 20)
	SUBS   $1, R12
	BNE    sixteenQuad

	MOVD R0, R11
	VST1 [V0.S4, V1.S4, V2.S4, V3.S4], (R11)
	ADD  R6, R11
	VST1 [V4.S4, V5.S4, V6.S4, V7.S4], (R11)
	ADD  R6, R11
	VST1 [V8.S4, V9.S4, V10.S4, V11.S4], (R11)
	ADD  R6, R11
	VST1 [V12.S4, V13.S4, V14.S4, V15.S4], (R11)
	ADD  $64, R0
	ADD  $64, R10
	SUB  $64, R9
	CMP  $64, R9
	BGE  sixteen
	CBZ  R9, fourDone

eight:
	MOVD R0, R11
	VLD1 (R11), [V0.S4, V1.S4]
	ADD  R6, R11
	VLD1 (R11), [V2.S4, V3.S4]
	ADD  R6, R11
	VLD1 (R11), [V4.S4, V5.S4]
	ADD  R6, R11
	VLD1 (R11), [V6.S4, V7.S4]
	open(R10)
	openWeights
	MOVD R5, R12

eightQuad:
	loadWeights
	VLD1.P (R19)(R8), [V20.S4, V21.S4]
	VLD1.P (R20)(R8), [V22.S4, V23.S4]
	VLD1.P (R21)(R8), [V24.S4, V25.S4]
	VLD1.P (R22)(R8), [V26.S4, V27.S4]
	by8(0, 20)
	by8(1, 22)
	by8(2, 24)
	by8(3, 26)
	SUBS   $1, R12
	BNE    eightQuad

	MOVD R0, R11
	VST1 [V0.S4, V1.S4], (R11)
	ADD  R6, R11
	VST1 [V2.S4, V3.S4], (R11)
	ADD  R6, R11
	VST1 [V4.S4, V5.S4], (R11)
	ADD  R6, R11
	VST1 [V6.S4, V7.S4], (R11)
	ADD  $32, R0

fourDone:
	ADD R6, R0 // one row's end is the next one's beginning
	ADD R6<<1, R0
	ADD R7<<2, R1
	SUB $4, R4
	CMP $4, R4
	BGE four

rest:
	CBZ R4, tail

	// One row: values go by as they lie in memory.
one:
	open(R3)
	SUB  R6, R8, R10 // from the end of a value to the next one's beginning
	MOVD R1, R23
	MOVD R5, R12

oneQuad:
	VLD1.P 16(R23), [V16.S4]
	MOVD   R0, R11
	MOVD   R6, R9

oneDims:
	VLD1   (R11), [V0.S4, V1.S4]
	VLD1.P 32(R19), [V20.S4, V21.S4]
	VLD1.P 32(R20), [V22.S4, V23.S4]
	VLD1.P 32(R21), [V24.S4, V25.S4]
	VLD1.P 32(R22), [V26.S4, V27.S4]
	fmlaby(0, 16, 20, 0)
	fmlaby(0, 16, 21, 1)
	fmlaby(1, 16, 22, 0)
	fmlaby(1, 16, 23, 1)
	fmlaby(2, 16, 24, 0)
	fmlaby(2, 16, 25, 1)
	fmlaby(3, 16, 26, 0)
	fmlaby(3, 16, 27, 1)
	VST1.P [V0.S4, V1.S4], 32(R11)
	SUBS   $32, R9
	BNE    oneDims

	ADD  R10, R19
	ADD  R10, R20
	ADD  R10, R21
	ADD  R10, R22
	SUBS $1, R12
	BNE  oneQuad

	ADD  R6, R0
	ADD  R7, R1
	SUBS $1, R4
	BNE  one

tail:
	// The keys of the last quad, if it has not four: one at a time.
	MOVD count+40(FP), R4
	ANDS $3, R4
	BEQ  done
	MOVD o+0(FP), R0
	MOVD p+8(FP), R1
	ADD  R5<<4, R1      // behind the weights of whole quads
	MUL  R5, R8, R10
	ADD  R10, R3        // and behind their values
	MOVD rows+32(FP), R12

tailRow:
	MOVD v+16(FP), R2
	MOVD R1, R23
	MOVD R4, R13

tailKey:
	MOVD.P  8(R2), R19
	ADD     R3, R19
	VLD1R.P 4(R23), [V16.S4]
	MOVD    R0, R11
	MOVD    R6, R9

tailDims:
	VLD1   (R11), [V0.S4, V1.S4]
	VLD1.P 32(R19), [V20.S4, V21.S4]
	fmla(16, 20, 0)
	fmla(16, 21, 1)
	VST1.P [V0.S4, V1.S4], 32(R11)
	SUBS   $32, R9
	BNE    tailDims

	SUBS $1, R13
	BNE  tailKey
	ADD  R6, R0
	ADD  R7, R1
	SUBS $1, R12
	BNE  tailRow

done:
	RET
