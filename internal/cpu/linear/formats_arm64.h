// What kernels that unpack rows of weights have in common with kernels that multiply them: the integers and the factors of formats.

// all1, all2 and all4 are the units of a group: of 128, 64 and 32 elements.
#define all1(unit) \
	unit(0)
#define all2(unit) \
	unit(0) \
	unit(2)
#define all4(unit) \
	unit(0) \
	unit(1) \
	unit(2) \
	unit(3)
#define none

// Integers of 4 bits use the constants 15 in V28 and, in V29, what is subtracted.

#define constants4(subtract) \
	movi8(15, 28) \
	movi8(subtract, 29)

// nibbles makes in d the lower halves of the bytes of v, and in e the upper ones.
#define nibbles(v, d, e) \
	and(28, v, d) \
	shr8(4, v, e)

// The fifth bits of 32 integers are 4 bytes of a vector: V30 and V31 have the byte of each integer, V25 its bit.
DATA fifthBytes<>+0(SB)/8, $0x0000000000000000
DATA fifthBytes<>+8(SB)/8, $0x0101010101010101
DATA fifthBytes<>+16(SB)/8, $0x0202020202020202
DATA fifthBytes<>+24(SB)/8, $0x0303030303030303
DATA fifthBytes<>+32(SB)/8, $0x8040201008040201
DATA fifthBytes<>+40(SB)/8, $0x8040201008040201
GLOBL fifthBytes<>(SB), RODATA|NOPTR, $48

#define constants5 \
	constants4(16) \
	MOVD $fifthBytes<>(SB), R13 \
	ldp(0, 13, 30, 31) \
	ldq(32, 13, 25)

// fifths adds the bits in v, which is changed, to the integers in d and e.
#define fifths(v, d, e) \
	tbl(31, v, 24) \
	tbl(30, v, v) \
	cmtst(25, 24, 24) \
	cmtst(25, v, v) \
	bit(29, v, d) \
	bit(29, 24, e)

// fifthsBelow is fifths with 16 subtracted from each integer, which makes 15 of no bit.
#define fifthsBelow(v, d, e) \
	tbl(31, v, 24) \
	tbl(30, v, v) \
	cmtst(25, 24, 24) \
	cmtst(25, v, v) \
	orr(28, 24, 24) \
	orr(28, v, v) \
	orn(v, d, d) \
	orn(24, e, e)

// fifthOf adds bits 4 of v to integers.
#define fifthOf(v, d) bit(29, v, d)

// up and down move the bits of bytes in v, and stay leaves those of a vector.
#define stay(by, v, d)
#define up(by, v, d) shl8(by, v, d)
#define down(by, v, d) shr8(by, v, d)

// sixBits makes the factors of 8 runs of Q4_K or Q5_K of the first 16 bytes of a block, in v: scales in d and e, minima in f and g. The
// other halves of the numbers are in V0 to V3, V16 and V17.
#define sixBits(v, d, e, f, g) \
	ext(4, v, v, 1) \
	ext(12, v, v, 2) \
	fcvtl(v, 3) \
	fneg(3, 17) \
	movi8(63, 16) \
	and(16, 1, 16) \
	shr8(6, 1, 1) \
	shl8(4, 1, 1) \
	shr8(4, 2, g) \
	and(28, 2, 2) \
	trn1(g, 2, 2) \
	orr(2, 1, 1) \
	trn1(1, 16, d) \
	trn2(1, 16, f) \
	sixBitFactors(d, e, 0, 3) \
	sixBitFactors(f, g, 1, 17)

// sixBitFactors makes of 8 bytes in d as many products with element i of by, in d and e.
#define sixBitFactors(d, e, i, by) \
	sxtl8(d, d) \
	sxtl16h(d, e) \
	sxtl16(d, d) \
	scvtf(d, d) \
	scvtf(e, e) \
	fmulby(i, by, d, d) \
	fmulby(i, by, e, e)

#define constants6 \
	movi8(15, 28) \
	movi8(32, 29) \
	movi8(48, 30)

// sixthOf adds bits 4 and 5 of v to integers.
#define sixthOf(v, d) bit(30, v, d)

// scalesQ6K makes the scales of 16 runs of their bytes in v and their factor, of 16 bits, in by: those of the first halves of four blocks
// in d, of the second halves in e, and of the other four blocks in f and g.
#define scalesQ6K(v, by, d, e, f, g) \
	fcvtsh(by, by) \
	sxtl8(v, 16) \
	sxtl8h(v, 17) \
	sxtl16(16, d) \
	sxtl16h(16, e) \
	sxtl16(17, f) \
	sxtl16h(17, g) \
	uzp1(e, d, 16) \
	uzp2(e, d, e) \
	uzp1(g, f, 17) \
	uzp2(g, f, g) \
	scvtf(16, d) \
	scvtf(e, e) \
	scvtf(17, f) \
	scvtf(g, g) \
	fmulby(0, by, d, d) \
	fmulby(0, by, e, e) \
	fmulby(0, by, f, f) \
	fmulby(0, by, g, g)
