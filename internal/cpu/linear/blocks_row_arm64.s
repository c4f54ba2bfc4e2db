//go:build gc && !noasm

// Kernels that multiply a row of x by rows of weights as they are stored, written by hand. Sums have a lane for each of four output
// features, which add up block after block, as in Go.

#include "go_asm.h"
#include "textflag.h"
#include "neon_arm64.h"
#include "products_arm64.h"
#include "formats_arm64.h"

// row is the function of a format whose units have 32 elements << shift. Rows of weights are at R4 to R7, a group of x at R12. Sums are in
// V14, those of minima in V15, and scales and sums of x in V18 and V19. unit(b) adds the products of block b, and of those behind it.
#define row(prepare, all, unit, shift, rest) \
	MOVD a+0(FP), R0 \
	MOVD blockRowArgs_y(R0), R1 \
	MOVD blockRowArgs_yStep(R0), R2 \
	MOVD blockRowArgs_w(R0), R3 \
	MOVD blockRowArgs_wRow(R0), R9 \
	MOVD blockRowArgs_x(R0), R8 \
	MOVD blockRowArgs_n(R0), R10 \
	MOVD blockRowArgs_sets(R0), R11 \
	prepare \
nextSet: \
	MOVD R3, R4 \
	ADD  R9, R4, R5 \
	ADD  R9, R5, R6 \
	ADD  R9, R6, R7 \
	ADD  R9, R7, R3 \
	MOVD R8, R12 \
	zero(14) \
	zero(15) \
	LSR  $7, R10, R13 \
	CBZ  R13, tail \
nextGroup: \
	ldp(xGroup_scales, 12, 18, 19) \
	all(unit) \
	ADD  $xGroup__size, R12 \
	SUB  $1, R13 \
	CBNZ R13, nextGroup \
tail: \
	AND  $127, R10, R15 \
	CBZ  R15, setEnd \
	ADD  $xGroup_scales, R12, R14 \
	LSR  $(5+(shift)), R15, R13 \
	CBZ  R13, noUnit \
nextUnit: \
	FMOVD (R14), F18 \
	FMOVD 16(R14), F19 \
	unit(0) \
	ADD  $(32<<(shift)), R12 \
	ADD  $(4<<(shift)), R14 \
	SUB  $1, R13 \
	CBNZ R13, nextUnit \
noUnit: \
	rest \
setEnd: \
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

// block loads x and sums the products of four streams in the lanes of V4.
#define block(b, stream) \
	ldp(32*(b), 12, 0, 1) \
	stream(4, 4) \
	stream(5, 5) \
	stream(6, 6) \
	stream(7, 7) \
	add4(4)

// halves and words load 2 or 4 bytes of each stream.
#define halves(d) \
	nexth(4, d) \
	laneh(1, 5, d) \
	laneh(2, 6, d) \
	laneh(3, 7, d)

#define words(d) \
	nexts(4, d) \
	lanes(1, 5, d) \
	lanes(2, 6, d) \
	lanes(3, 7, d)

// scaled adds the sums in V4 with the scales of the weights in V21.
#define scaled(b) \
	fmulby(b, 18, 21, 21) \
	fmul(21, 4, 4) \
	fadd(4, 14, 14)

// lowered is scaled with minima in V23.
#define lowered(b) \
	scaled(b) \
	fmulby(b, 19, 23, 23) \
	fadd(23, 15, 15)

// twoFactors makes scales in V21 and minima in V23 of their numbers of 16 bits, side by side in V21.
#define twoFactors \
	uzp2h(21, 21, 23) \
	uzp1h(21, 21, 21) \
	fcvtl(23, 23) \
	fcvtl(21, 21)

// Streams of the formats, with either kind of products.

#define bytesOf(products, w, d) \
	nextp(w, 2, 3) \
	products(2, 3, 0, 1, 26, d)
#define bytesNEON(w, d) bytesOf(products, w, d)
#define bytesDot(w, d) bytesOf(productsDot, w, d)

// Of the bytes of Q4_0, with the highest bits of both halves changed, each half times 16 is 16 times the integer less 8.
#define signedOf(products, w, d) \
	nextq(w, 3) \
	eor(29, 3, 3) \
	shl8(4, 3, 2) \
	and(28, 3, 3) \
	products(2, 3, 0, 1, 26, d)
#define signedNEON(w, d) signedOf(products, w, d)
#define signedDot(w, d) signedOf(productsDot, w, d)

#define constantsQ40 \
	movi8(0x88, 29) \
	movi8(0xf0, 28)

#define nibblesOf(products, w, d) \
	nextq(w, 3) \
	nibbles(3, 2, 3) \
	products(2, 3, 0, 1, 26, d)
#define nibblesNEON(w, d) nibblesOf(products, w, d)
#define nibblesDot(w, d) nibblesOf(productsDot, w, d)

#define fifthsOf(products, add, w, d) \
	nexts(w, 20) \
	nextq(w, 3) \
	nibbles(3, 2, 3) \
	add(20, 2, 3) \
	products(2, 3, 0, 1, 26, d)
#define fifthsNEON(w, d) fifthsOf(products, fifths, w, d)
#define fifthsDot(w, d) fifthsOf(productsDot, fifths, w, d)
#define belowNEON(w, d) fifthsOf(products, fifthsBelow, w, d)
#define belowDot(w, d) fifthsOf(productsDot, fifthsBelow, w, d)

#define blockI8(b, stream) \
	block(b, stream) \
	scvtf(4, 4) \
	fmulby(b, 18, 4, 4) \
	fadd(4, 14, 14)
#define unitI8NEON(b) blockI8(b, bytesNEON)
#define unitI8Dot(b) blockI8(b, bytesDot)

// moved copies the bytes of a row that are not a whole block, R13 of them, to R16 with zeros behind them.
#define moved(w) \
	stp(0, 16, 27, 27) \
	MOVD R16, R19 \
	MOVD R13, R20 \
	MOVBU.P 1(w), R21 \
	MOVB.P R21, 1(R19) \
	SUB  $1, R20 \
	CBNZ R20, -3(PC) \
	MOVD R16, w \
	ADD  $32, R16

#define restOf(unit) \
	AND  $31, R15, R13 \
	CBZ  R13, setEnd \
	MOVD $rest-128(SP), R16 \
	zero(27) \
	moved(R4) \
	moved(R5) \
	moved(R6) \
	moved(R7) \
	FMOVS (R14), F18 \
	unit(0)

#define restI8NEON restOf(unitI8NEON)
#define restI8Dot restOf(unitI8Dot)

// func rowI8NEON(a *blockRowArgs)
TEXT ·rowI8NEON(SB), NOSPLIT, $128-8
	row(none, all4, unitI8NEON, 0, restI8NEON)

// func rowI8Dot(a *blockRowArgs)
TEXT ·rowI8Dot(SB), NOSPLIT, $128-8
	row(none, all4, unitI8Dot, 0, restI8Dot)

// blockOf is a block of a format with a scale.
#define blockOf(b, stream, toFloat) \
	halves(21) \
	block(b, stream) \
	fcvtl(21, 21) \
	toFloat(4, 4) \
	scaled(b)
#define unitQ80NEON(b) blockOf(b, bytesNEON, scvtf)
#define unitQ80Dot(b) blockOf(b, bytesDot, scvtf)
#define unitQ40NEON(b) blockOf(b, signedNEON, scvtf16th)
#define unitQ40Dot(b) blockOf(b, signedDot, scvtf16th)
#define unitQ50NEON(b) blockOf(b, belowNEON, scvtf)
#define unitQ50Dot(b) blockOf(b, belowDot, scvtf)

// func rowQ80NEON(a *blockRowArgs)
TEXT ·rowQ80NEON(SB), NOSPLIT, $0-8
	row(none, all4, unitQ80NEON, 0, none)

// func rowQ80Dot(a *blockRowArgs)
TEXT ·rowQ80Dot(SB), NOSPLIT, $0-8
	row(none, all4, unitQ80Dot, 0, none)

// func rowQ40NEON(a *blockRowArgs)
TEXT ·rowQ40NEON(SB), NOSPLIT, $0-8
	row(constantsQ40, all4, unitQ40NEON, 0, none)

// func rowQ40Dot(a *blockRowArgs)
TEXT ·rowQ40Dot(SB), NOSPLIT, $0-8
	row(constantsQ40, all4, unitQ40Dot, 0, none)

// func rowQ50NEON(a *blockRowArgs)
TEXT ·rowQ50NEON(SB), NOSPLIT, $0-8
	row(constants5, all4, unitQ50NEON, 0, none)

// func rowQ50Dot(a *blockRowArgs)
TEXT ·rowQ50Dot(SB), NOSPLIT, $0-8
	row(constants5, all4, unitQ50Dot, 0, none)

// blockOfMinima is a block of a format with a scale and a minimum.
#define blockOfMinima(b, stream) \
	words(21) \
	block(b, stream) \
	twoFactors \
	scvtf(4, 4) \
	lowered(b)
#define unitQ41NEON(b) blockOfMinima(b, nibblesNEON)
#define unitQ41Dot(b) blockOfMinima(b, nibblesDot)
#define unitQ51NEON(b) blockOfMinima(b, fifthsNEON)
#define unitQ51Dot(b) blockOfMinima(b, fifthsDot)

// func rowQ41NEON(a *blockRowArgs)
TEXT ·rowQ41NEON(SB), NOSPLIT, $0-8
	row(constants4(0), all4, unitQ41NEON, 0, none)

// func rowQ41Dot(a *blockRowArgs)
TEXT ·rowQ41Dot(SB), NOSPLIT, $0-8
	row(constants4(0), all4, unitQ41Dot, 0, none)

// func rowQ51NEON(a *blockRowArgs)
TEXT ·rowQ51NEON(SB), NOSPLIT, $0-8
	row(constants5, all4, unitQ51NEON, 0, none)

// func rowQ51Dot(a *blockRowArgs)
TEXT ·rowQ51Dot(SB), NOSPLIT, $0-8
	row(constants5, all4, unitQ51Dot, 0, none)

// head loads the scales of groups of INT4 to V22, and their zeros to V23.
#define head \
	halves(22) \
	nextb(4, 23) \
	laneb(4, 5, 23) \
	laneb(8, 6, 23) \
	laneb(12, 7, 23) \
	fcvtl(22, 22)

// zeroed is a block of INT4: the integers are less than they should be by the zero times the sum of x.
#define zeroed(b, stream, products) \
	block(b, stream) \
	products(29, 29, 0, 1, 26, 20) \
	addv(20, 20) \
	mlsby0(20, 23, 4) \
	scvtf(4, 4) \
	fmulby(b, 18, 22, 21) \
	fmul(21, 4, 4) \
	fadd(4, 14, 14)
#define zeroedNEON(b) zeroed(b, nibblesNEON, products)
#define zeroedDot(b) zeroed(b, nibblesDot, productsDot)

#define unitI4x32NEON(b) \
	head \
	zeroedNEON(b)
#define unitI4x32Dot(b) \
	head \
	zeroedDot(b)

// func rowI4x32NEON(a *blockRowArgs)
TEXT ·rowI4x32NEON(SB), NOSPLIT, $0-8
	row(constants4(1), all4, unitI4x32NEON, 0, none)

// func rowI4x32Dot(a *blockRowArgs)
TEXT ·rowI4x32Dot(SB), NOSPLIT, $0-8
	row(constants4(1), all4, unitI4x32Dot, 0, none)

#define unitI4x64NEON(b) \
	head \
	zeroedNEON(b) \
	zeroedNEON((b)+1)
#define unitI4x64Dot(b) \
	head \
	zeroedDot(b) \
	zeroedDot((b)+1)

// func rowI4x64NEON(a *blockRowArgs)
TEXT ·rowI4x64NEON(SB), NOSPLIT, $0-8
	row(constants4(1), all2, unitI4x64NEON, 1, none)

// func rowI4x64Dot(a *blockRowArgs)
TEXT ·rowI4x64Dot(SB), NOSPLIT, $0-8
	row(constants4(1), all2, unitI4x64Dot, 1, none)

#define unitI4x128NEON(b) \
	head \
	all4(zeroedNEON)
#define unitI4x128Dot(b) \
	head \
	all4(zeroedDot)

// func rowI4x128NEON(a *blockRowArgs)
TEXT ·rowI4x128NEON(SB), NOSPLIT, $0-8
	row(constants4(1), all1, unitI4x128NEON, 2, none)

// func rowI4x128Dot(a *blockRowArgs)
TEXT ·rowI4x128Dot(SB), NOSPLIT, $0-8
	row(constants4(1), all1, unitI4x128Dot, 2, none)
