//go:build gc && !noasm

// The kernels of attention_arm64.s for float64, with the same steps on half as many numbers in a vector.

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
	fmla64(q, (k)+0, (s)+0) \
	fmla64(q, (k)+2, (s)+1) \
	fmla64(q, (k)+4, (s)+2) \
	fmla64(q, (k)+6, (s)+3)

// sum4 adds up each of the vectors s to s+3, and makes two vectors of the four sums, in s and s+1.
#define sum4(s) \
	faddp64((s)+1, (s)+0, (s)+0) \
	faddp64((s)+3, (s)+2, (s)+1)

// func score64NEON(s, q *float64, k *streams, at, rows, count, dim, stride, step int)
TEXT ·score64NEON(SB), NOSPLIT, $0-72
	MOVD s+0(FP), R0
	MOVD q+8(FP), R1
	MOVD k+16(FP), R2
	MOVD at+24(FP), R3
	MOVD rows+32(FP), R4
	MOVD count+40(FP), R5   // that are left
	MOVD dim+48(FP), R6
	MOVD stride+56(FP), R7
	MOVD step+64(FP), R8
	LSL  $3, R6             // in bytes from here on
	LSL  $3, R7
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
	VLD1.P 32(R19), [V16.D2, V17.D2]
	VLD1.P 32(R20), [V18.D2, V19.D2]
	VLD1.P 32(R21), [V20.D2, V21.D2]
	VLD1.P 32(R22), [V22.D2, V23.D2]
	VLD1.P 32(R23), [V24.D2, V25.D2]
	VLD1.P 32(R24), [V26.D2, V27.D2]
	VLD1.P 32(R25), [V28.D2, V29.D2]
	VLD1.P 32(R26), [V30.D2, V31.D2]
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
	VST1 [V0.D2, V1.D2], (R13)
	ADD  R7, R13
	VST1 [V4.D2, V5.D2], (R13)
	ADD  R7, R13
	VST1 [V8.D2, V9.D2], (R13)
	ADD  R7, R13
	VST1 [V12.D2, V13.D2], (R13)
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
	VLD1.P 32(R19), [V16.D2, V17.D2]
	VLD1.P 32(R20), [V18.D2, V19.D2]
	VLD1.P 32(R21), [V20.D2, V21.D2]
	VLD1.P 32(R22), [V22.D2, V23.D2]
	VLD1.P 32(R14), [V24.D2, V25.D2]
	dots(24, 16, 0)
	dots(25, 17, 4)
	SUBS   $32, R2
	BNE    oneDims

	fadd64(4, 0, 0)
	fadd64(5, 1, 1)
	fadd64(6, 2, 2)
	fadd64(7, 3, 3)
	sum4(0)
	VST1 [V0.D2, V1.D2], (R13)
	ADD  R7, R13
	SUBS $1, R15
	BNE  one

next:
	ADD  $32, R0
	ADD  R8, R9
	ADD  R8, R10
	ADD  R8, R11
	ADD  R8, R12
	SUBS $4, R5
	BGT  quad
	RET

// What exp4 computes with: see exp4.go, and exp4F64 in _gen/attention for the coefficients.
DATA exp4NEON64<>+0(SB)/8, $3377699720527872.0 // shift
DATA exp4NEON64<>+8(SB)/8, $-511.0
DATA exp4NEON64<>+16(SB)/8, $9.082411618714372e-07 // c11
DATA exp4NEON64<>+24(SB)/8, $7.243554046467209e-06 // c10
DATA exp4NEON64<>+32(SB)/8, $5.211238180783175e-05 // c9
DATA exp4NEON64<>+40(SB)/8, $0.0003383151432270973 // c8
DATA exp4NEON64<>+48(SB)/8, $0.0019523498871203185 // c7
DATA exp4NEON64<>+56(SB)/8, $0.009858259492551738 // c6
DATA exp4NEON64<>+64(SB)/8, $0.042667386069678785 // c5
DATA exp4NEON64<>+72(SB)/8, $0.15389006572150593 // c4
DATA exp4NEON64<>+80(SB)/8, $0.4440328693185607 // c3
DATA exp4NEON64<>+88(SB)/8, $0.9609060278364052 // c2
DATA exp4NEON64<>+96(SB)/8, $1.3862943611198906 // c1
DATA exp4NEON64<>+104(SB)/8, $1.0
GLOBL exp4NEON64<>(SB), RODATA|NOPTR, $112

// exp4 replaces the vector x by 4^(x-top), with top in V30 and the constants in V16 to V29. a, b, c and d are
// its own. It has t in a, f in b, and the polynomial in c and d in turn; then 2^n in a. x is where the result is 0,
// which is nowhere for NaN.
#define exp4(x, a, b, c, d) \
	fsub64(30, x, x) \
	fadd64(16, x, a) \
	fsub64(16, a, b) \
	fsub64(b, x, b) \
	mov(19, c) \
	fmla64(18, b, c) \
	mov(20, d) \
	fmla64(c, b, d) \
	mov(21, c) \
	fmla64(d, b, c) \
	mov(22, d) \
	fmla64(c, b, d) \
	mov(23, c) \
	fmla64(d, b, c) \
	mov(24, d) \
	fmla64(c, b, d) \
	mov(25, c) \
	fmla64(d, b, c) \
	mov(26, d) \
	fmla64(c, b, d) \
	mov(27, c) \
	fmla64(d, b, c) \
	mov(28, d) \
	fmla64(c, b, d) \
	mov(29, c) \
	fmla64(d, b, c) \
	shl52(a, a) \
	add64(29, a, a) \
	fmul64(a, c, c) \
	fcmgt64(x, 17, x) \
	bic(x, c, x)

// func weigh64NEON(s, o, m, l *float64, rows, n, stride, dim int) (empty int)
TEXT ·weigh64NEON(SB), NOSPLIT, $0-72
	MOVD s+0(FP), R0
	MOVD o+8(FP), R1
	MOVD m+16(FP), R2
	MOVD l+24(FP), R3
	MOVD rows+32(FP), R4
	MOVD n+40(FP), R5
	MOVD stride+48(FP), R6
	MOVD dim+56(FP), R7
	LSL  $3, R6            // bytes
	MOVD ZR, R8            // rows that are left as they are
	MOVD $0xFFF0000000000000, R9   // -Inf

	MOVD    $exp4NEON64<>(SB), R10
	VLD1R.P 8(R10), [V16.D2]
	VLD1R.P 8(R10), [V17.D2]
	VLD1R.P 8(R10), [V18.D2]
	VLD1R.P 8(R10), [V19.D2]
	VLD1R.P 8(R10), [V20.D2]
	VLD1R.P 8(R10), [V21.D2]
	VLD1R.P 8(R10), [V22.D2]
	VLD1R.P 8(R10), [V23.D2]
	VLD1R.P 8(R10), [V24.D2]
	VLD1R.P 8(R10), [V25.D2]
	VLD1R.P 8(R10), [V26.D2]
	VLD1R.P 8(R10), [V27.D2]
	VLD1R.P 8(R10), [V28.D2]
	VLD1R   (R10), [V29.D2]

row:
	// The maximum of four numbers at a time, then of one.
	VLD1R (R2), [V0.D2]
	VMOV  V0.B16, V1.B16
	VMOV  V0.B16, V31.B16 // the old one
	MOVD  R0, R10
	SUBS  $4, R5, R11
	BLT   maxRest

maxFour:
	VLD1.P 32(R10), [V2.D2, V3.D2]
	fmax64(2, 0, 0)
	fmax64(3, 1, 1)
	SUBS   $4, R11
	BGE    maxFour

maxRest:
	ADDS $4, R11
	BEQ  maxDone

maxOne:
	VLD1R.P 8(R10), [V2.D2]
	fmax64(2, 0, 0)
	SUBS    $1, R11
	BNE     maxOne

maxDone:
	fmax64(1, 0, 0)
	fmaxp64(0, 30)
	FMOVD F30, R12
	CMP   R9, R12
	BEQ   left
	VDUP  V30.D[0], V30.D2

	// The weights and their sum, in the same way.
	VEOR V14.B16, V14.B16, V14.B16
	VEOR V15.B16, V15.B16, V15.B16
	MOVD R0, R10
	SUBS $4, R5, R11
	BLT  expRest

expFour:
	VLD1   (R10), [V0.D2, V1.D2]
	exp4(0, 2, 3, 4, 5)
	exp4(1, 6, 7, 8, 9)
	VST1.P [V0.D2, V1.D2], 32(R10)
	fadd64(0, 14, 14)
	fadd64(1, 15, 15)
	SUBS   $4, R11
	BGE    expFour

expRest:
	ADDS $4, R11
	fadd64(15, 14, 14)
	faddp64(14, 14, 14)
	BEQ  expDone

expOne:
	FMOVD   (R10), F0
	exp4(0, 2, 3, 4, 5)
	FMOVD.P F0, 8(R10)
	FADDD   F0, F14, F14
	SUBS    $1, R11
	BNE     expOne

expDone:
	// What the row has is scaled, unless it has nothing, or the maximum is still the same. (That may be +Inf,
	// of which no factor could be computed.)
	FMOVD (R3), F1
	FMOVD F31, R12
	CMP   R9, R12
	BEQ   scaled
	FCMPD F30, F31
	BEQ   scaled
	VMOV  V31.B16, V0.B16
	exp4(0, 2, 3, 4, 5)
	FMULD F0, F1, F1
	MOVD  R1, R10
	MOVD  R7, R11

scale:
	VLD1   (R10), [V2.D2, V3.D2]
	fmul64(0, 2, 2)
	fmul64(0, 3, 3)
	VST1.P [V2.D2, V3.D2], 32(R10)
	SUBS   $4, R11
	BNE    scale

scaled:
	FADDD F14, F1, F1
	FMOVD F1, (R3)
	FMOVD F30, (R2)
	B     next

left:
	ADD $1, R8

next:
	ADD  R6, R0
	ADD  R7<<3, R1
	ADD  $8, R2
	ADD  $8, R3
	SUBS $1, R4
	BNE  row
	MOVD R8, empty+64(FP)
	RET

// by8 adds 8 elements of a value, in v to v+3, times element i of the rows' weights, in w, w+2, w+4 and w+6, to V0 to V15.
#define by8(i, w, v) \
	fmlaby64(i, (w)+0, (v)+0, 0) \
	fmlaby64(i, (w)+0, (v)+1, 1) \
	fmlaby64(i, (w)+0, (v)+2, 2) \
	fmlaby64(i, (w)+0, (v)+3, 3) \
	fmlaby64(i, (w)+2, (v)+0, 4) \
	fmlaby64(i, (w)+2, (v)+1, 5) \
	fmlaby64(i, (w)+2, (v)+2, 6) \
	fmlaby64(i, (w)+2, (v)+3, 7) \
	fmlaby64(i, (w)+4, (v)+0, 8) \
	fmlaby64(i, (w)+4, (v)+1, 9) \
	fmlaby64(i, (w)+4, (v)+2, 10) \
	fmlaby64(i, (w)+4, (v)+3, 11) \
	fmlaby64(i, (w)+6, (v)+0, 12) \
	fmlaby64(i, (w)+6, (v)+1, 13) \
	fmlaby64(i, (w)+6, (v)+2, 14) \
	fmlaby64(i, (w)+6, (v)+3, 15)

// by4 is by8 for 4 elements, and V0 to V7.
#define by4(i, w, v) \
	fmlaby64(i, (w)+0, (v)+0, 0) \
	fmlaby64(i, (w)+0, (v)+1, 1) \
	fmlaby64(i, (w)+2, (v)+0, 2) \
	fmlaby64(i, (w)+2, (v)+1, 3) \
	fmlaby64(i, (w)+4, (v)+0, 4) \
	fmlaby64(i, (w)+4, (v)+1, 5) \
	fmlaby64(i, (w)+6, (v)+0, 6) \
	fmlaby64(i, (w)+6, (v)+1, 7)

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
	VLD1.P 32(R23), [V16.D2, V17.D2] \
	VLD1.P 32(R24), [V18.D2, V19.D2] \
	VLD1.P 32(R25), [V20.D2, V21.D2] \
	VLD1.P 32(R26), [V22.D2, V23.D2]

// func weighted64NEON(o, p *float64, v *streams, at, rows, count, dim, stride, step int)
TEXT ·weighted64NEON(SB), NOSPLIT, $0-72
	MOVD o+0(FP), R0
	MOVD p+8(FP), R1
	MOVD v+16(FP), R2
	MOVD at+24(FP), R3
	MOVD rows+32(FP), R4
	MOVD count+40(FP), R5
	MOVD dim+48(FP), R6
	MOVD stride+56(FP), R7
	MOVD step+64(FP), R8
	LSL  $3, R6            // bytes
	LSL  $3, R7            // bytes
	LSR  $2, R5            // quads
	CBZ  R5, tail

	// Four rows: their sums in columns of 8 elements, or 4, stay in registers while all keys go by.
	CMP $4, R4
	BLT rest

four:
	MOVD R6, R9 // bytes that are left
	MOVD R3, R10
	CMP  $64, R9
	BLT  fourColumns

eight:
	MOVD R0, R11
	VLD1 (R11), [V0.D2, V1.D2, V2.D2, V3.D2]
	ADD  R6, R11
	VLD1 (R11), [V4.D2, V5.D2, V6.D2, V7.D2]
	ADD  R6, R11
	VLD1 (R11), [V8.D2, V9.D2, V10.D2, V11.D2]
	ADD  R6, R11
	VLD1 (R11), [V12.D2, V13.D2, V14.D2, V15.D2]
	open(R10)
	openWeights
	MOVD R5, R12

eightQuad:
	loadWeights
	VLD1.P (R19)(R8), [V24.D2, V25.D2, V26.D2, V27.D2]
	VLD1.P (R20)(R8), [V28.D2, V29.D2, V30.D2, V31.D2]
	by8(0, 16, 24)
	by8(1, 16, 28)
	VLD1.P (R21)(R8), [V24.D2, V25.D2, V26.D2, V27.D2]
	VLD1.P (R22)(R8), [V28.D2, V29.D2, V30.D2, V31.D2]
	by8(0, 17, 24)
	by8(1, 17, 28)
	SUBS   $1, R12
	BNE    eightQuad

	MOVD R0, R11
	VST1 [V0.D2, V1.D2, V2.D2, V3.D2], (R11)
	ADD  R6, R11
	VST1 [V4.D2, V5.D2, V6.D2, V7.D2], (R11)
	ADD  R6, R11
	VST1 [V8.D2, V9.D2, V10.D2, V11.D2], (R11)
	ADD  R6, R11
	VST1 [V12.D2, V13.D2, V14.D2, V15.D2], (R11)
	ADD  $64, R0
	ADD  $64, R10
	SUB  $64, R9
	CMP  $64, R9
	BGE  eight
	CBZ  R9, fourDone

fourColumns:
	MOVD R0, R11
	VLD1 (R11), [V0.D2, V1.D2]
	ADD  R6, R11
	VLD1 (R11), [V2.D2, V3.D2]
	ADD  R6, R11
	VLD1 (R11), [V4.D2, V5.D2]
	ADD  R6, R11
	VLD1 (R11), [V6.D2, V7.D2]
	open(R10)
	openWeights
	MOVD R5, R12

fourQuad:
	loadWeights
	VLD1.P (R19)(R8), [V24.D2, V25.D2]
	VLD1.P (R20)(R8), [V26.D2, V27.D2]
	VLD1.P (R21)(R8), [V28.D2, V29.D2]
	VLD1.P (R22)(R8), [V30.D2, V31.D2]
	by4(0, 16, 24)
	by4(1, 16, 26)
	by4(0, 17, 28)
	by4(1, 17, 30)
	SUBS   $1, R12
	BNE    fourQuad

	MOVD R0, R11
	VST1 [V0.D2, V1.D2], (R11)
	ADD  R6, R11
	VST1 [V2.D2, V3.D2], (R11)
	ADD  R6, R11
	VST1 [V4.D2, V5.D2], (R11)
	ADD  R6, R11
	VST1 [V6.D2, V7.D2], (R11)
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
	VLD1.P 32(R23), [V16.D2, V17.D2]
	MOVD   R0, R11
	MOVD   R6, R9

oneDims:
	VLD1   (R11), [V0.D2, V1.D2]
	VLD1.P 32(R19), [V20.D2, V21.D2]
	VLD1.P 32(R20), [V22.D2, V23.D2]
	VLD1.P 32(R21), [V24.D2, V25.D2]
	VLD1.P 32(R22), [V26.D2, V27.D2]
	fmlaby64(0, 16, 20, 0)
	fmlaby64(0, 16, 21, 1)
	fmlaby64(1, 16, 22, 0)
	fmlaby64(1, 16, 23, 1)
	fmlaby64(0, 17, 24, 0)
	fmlaby64(0, 17, 25, 1)
	fmlaby64(1, 17, 26, 0)
	fmlaby64(1, 17, 27, 1)
	VST1.P [V0.D2, V1.D2], 32(R11)
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
	ADD  R5<<5, R1      // behind the weights of whole quads
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
	VLD1R.P 8(R23), [V16.D2]
	MOVD    R0, R11
	MOVD    R6, R9

tailDims:
	VLD1   (R11), [V0.D2, V1.D2]
	VLD1.P 32(R19), [V20.D2, V21.D2]
	fmla64(16, 20, 0)
	fmla64(16, 21, 1)
	VST1.P [V0.D2, V1.D2], 32(R11)
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
