// Instructions that the Go assembler has no name for, and some that it has, since macros take registers by number. Operands are in Go's
// order: the result, vector d, comes last. A macro's comment is the instruction in Arm's notation.

#define vector3(op, m, n, d) WORD $((op) | (m)<<16 | (n)<<5 | (d))
#define vector2(op, n, d) vector3(op, 0, n, d)

// float32
#define fadd(m, n, d) vector3(0x4E20D400, m, n, d)  // fadd  vd.4s, vn.4s, vm.4s
#define fmul(m, n, d) vector3(0x6E20DC00, m, n, d)  // fmul  vd.4s, vn.4s, vm.4s
#define fmla(m, n, d) vector3(0x4E20CC00, m, n, d)  // fmla  vd.4s, vn.4s, vm.4s
#define faddp(m, n, d) vector3(0x6E20D400, m, n, d) // faddp vd.4s, vn.4s, vm.4s
#define fabs(n, d) vector2(0x4EA0F800, n, d)        // fabs  vd.4s, vn.4s
#define fneg(n, d) vector2(0x6EA0F800, n, d)        // fneg  vd.4s, vn.4s
#define scvtf(n, d) vector2(0x4E21D800, n, d)       // scvtf vd.4s, vn.4s
#define fcvtns(n, d) vector2(0x4E21A800, n, d)      // fcvtns vd.4s, vn.4s
#define fcvtl(n, d) vector2(0x0E217800, n, d)       // fcvtl vd.4s, vn.4h
#define fcvtl2(n, d) vector2(0x4E217800, n, d)      // fcvtl2 vd.4s, vn.8h
#define fcvtsh(n, d) vector2(0x1EE24000, n, d)      // fcvt  sd, hn
#define scvtf16th(n, d) vector2(0x4F3CE400, n, d)   // scvtf vd.4s, vn.4s, #4
#define fmulby(i, m, n, d) vector3(0x4F809000 | ((i)&1)<<21 | ((i)>>1)<<11, m, n, d) // fmul vd.4s, vn.4s, vm.s[i]

// integers
#define sdot(m, n, d) vector3(0x4E809400, m, n, d)   // sdot   vd.4s, vn.16b, vm.16b
#define sdotby(i, m, n, d) vector3(0x4F80E000 | ((i)&1)<<21 | ((i)>>1)<<11, m, n, d) // sdot vd.4s, vn.16b, vm.4b[i]
#define smull(m, n, d) vector3(0x0E20C000, m, n, d)  // smull  vd.8h, vn.8b, vm.8b
#define smlal2(m, n, d) vector3(0x4E208000, m, n, d) // smlal2 vd.8h, vn.16b, vm.16b
#define saddlp(n, d) vector2(0x4E602800, n, d)       // saddlp vd.4s, vn.8h
#define sadalp(n, d) vector2(0x4E606800, n, d)       // sadalp vd.4s, vn.8h
#define add(m, n, d) vector3(0x4EA08400, m, n, d)    // add    vd.4s, vn.4s, vm.4s
#define addp(m, n, d) vector3(0x4EA0BC00, m, n, d)   // addp   vd.4s, vn.4s, vm.4s
#define addv(n, d) vector2(0x4EB1B800, n, d)         // addv   sd, vn.4s
#define umax(m, n, d) vector3(0x6EA06400, m, n, d)   // umax   vd.4s, vn.4s, vm.4s
#define umaxv(n, d) vector2(0x6EB0A800, n, d)        // umaxv  sd, vn.4s
#define sub8(m, n, d) vector3(0x6E208400, m, n, d)   // sub    vd.16b, vn.16b, vm.16b
#define mlsby0(m, n, d) vector3(0x6F804000, m, n, d) // mls    vd.4s, vn.4s, vm.s[0]

// bits
#define and(m, n, d) vector3(0x4E201C00, m, n, d)    // and   vd.16b, vn.16b, vm.16b
#define orr(m, n, d) vector3(0x4EA01C00, m, n, d)    // orr   vd.16b, vn.16b, vm.16b
#define orn(m, n, d) vector3(0x4EE01C00, m, n, d)    // orn   vd.16b, vn.16b, vm.16b
#define eor(m, n, d) vector3(0x6E201C00, m, n, d)    // eor   vd.16b, vn.16b, vm.16b
#define bit(m, n, d) vector3(0x6EA01C00, m, n, d)    // bit   vd.16b, vn.16b, vm.16b
#define cmtst(m, n, d) vector3(0x4E208C00, m, n, d)  // cmtst vd.16b, vn.16b, vm.16b
#define shr8(by, n, d) vector3(0x6F000400, 16-(by), n, d) // ushr vd.16b, vn.16b, #by
#define shl8(by, n, d) vector3(0x4F005400, 8+(by), n, d)  // shl  vd.16b, vn.16b, #by
#define movi8(x, d) WORD $(0x4F00E400 | ((x)>>5)<<16 | ((x)&31)<<5 | (d)) // movi vd.16b, #x
#define zero(d) WORD $(0x6F00E400 | (d))                 // movi vd.2d, #0
#define one32(d) WORD $(0x4F03F600 | (d))                 // fmov vd.4s, #1.0

#define bic14(d) WORD $(0x6F02B400 | (d))                 // bic vd.8h, #64, lsl #8

// places
#define sxtl8(n, d) vector2(0x0F08A400, n, d)        // sxtl  vd.8h, vn.8b
#define sxtl8h(n, d) vector2(0x4F08A400, n, d)       // sxtl2 vd.8h, vn.16b
#define sxtl16(n, d) vector2(0x0F10A400, n, d)       // sxtl  vd.4s, vn.4h
#define sxtl16h(n, d) vector2(0x4F10A400, n, d)      // sxtl2 vd.4s, vn.8h
#define trn1(m, n, d) vector3(0x4E802800, m, n, d)   // trn1  vd.4s, vn.4s, vm.4s
#define trn2(m, n, d) vector3(0x4E806800, m, n, d)   // trn2  vd.4s, vn.4s, vm.4s
#define trn1d(m, n, d) vector3(0x4EC02800, m, n, d)  // trn1  vd.2d, vn.2d, vm.2d
#define trn2d(m, n, d) vector3(0x4EC06800, m, n, d)  // trn2  vd.2d, vn.2d, vm.2d
#define uzp1b(m, n, d) vector3(0x4E001800, m, n, d)  // uzp1  vd.16b, vn.16b, vm.16b
#define uzp1h(m, n, d) vector3(0x4E401800, m, n, d)  // uzp1  vd.8h, vn.8h, vm.8h
#define uzp2h(m, n, d) vector3(0x4E405800, m, n, d)  // uzp2  vd.8h, vn.8h, vm.8h
#define uzp1(m, n, d) vector3(0x4E801800, m, n, d)   // uzp1  vd.4s, vn.4s, vm.4s
#define uzp2(m, n, d) vector3(0x4E805800, m, n, d)   // uzp2  vd.4s, vn.4s, vm.4s
#define ext(by, m, n, d) vector3(0x6E000000 | (by)<<11, m, n, d) // ext vd.16b, vn.16b, vm.16b, #by
#define shll16(n, d) vector2(0x2E613800, n, d)       // shll  vd.4s, vn.4h, #16
#define sxtl8by7(n, d) vector2(0x0F0FA400, n, d)     // sshll vd.8h, vn.8b, #7
#define tbl(m, n, d) vector3(0x4E000000, m, n, d)    // tbl   vd.16b, {vn.16b}, vm.16b
#define dup(i, n, d) vector2(0x4E040400 | (i)<<19, n, d) // dup vd.4s, vn.s[i]
#define dup8(i, n, d) vector2(0x4E010400 | (i)<<17, n, d) // dup vd.16b, vn.b[i]

// Loads and stores. n is a general register, off a multiple of the access, and "next" makes n point behind the access.
#define ldq(off, n, d) WORD $(0x3DC00000 | ((off)/16)<<10 | (n)<<5 | (d)) // ldr qd, [xn, #off]
#define stq(off, n, d) WORD $(0x3D800000 | ((off)/16)<<10 | (n)<<5 | (d)) // str qd, [xn, #off]
#define ldp(off, n, d, e) WORD $(0xAD400000 | ((off)/16)<<15 | (e)<<10 | (n)<<5 | (d)) // ldp qd, qe, [xn, #off]
#define stp(off, n, d, e) WORD $(0xAD000000 | ((off)/16)<<15 | (e)<<10 | (n)<<5 | (d)) // stp qd, qe, [xn, #off]
#define ldh(off, n, d) WORD $(0x7D400000 | ((off)/2)<<10 | (n)<<5 | (d)) // ldr hd, [xn, #off]
#define sts(off, n, d) WORD $(0xBD000000 | ((off)/4)<<10 | (n)<<5 | (d)) // str sd, [xn, #off]
#define nextst4(n, d) WORD $(0x4C9F0800 | (n)<<5 | (d))   // st4 {vd.4s to v(d+3).4s}, [xn], #64
#define nextq(n, d) WORD $(0x3CC10400 | (n)<<5 | (d))     // ldr qd, [xn], #16
#define nextp(n, d, e) WORD $(0xACC10000 | (e)<<10 | (n)<<5 | (d)) // ldp qd, qe, [xn], #32
#define nexts(n, d) WORD $(0xBC404400 | (n)<<5 | (d))     // ldr sd, [xn], #4
#define nexth(n, d) WORD $(0x7C402400 | (n)<<5 | (d))     // ldr hd, [xn], #2
#define nextd(n, d) WORD $(0xFC408400 | (n)<<5 | (d))     // ldr dd, [xn], #8
#define nextb(n, d) WORD $(0x3C401400 | (n)<<5 | (d))     // ldr bd, [xn], #1
#define laneb(i, n, d) WORD $(0x0DDF0000 | ((i)>>3)<<30 | (((i)>>2)&1)<<12 | ((i)&3)<<10 | (n)<<5 | (d)) // ld1 {vd.b}[i], [xn], #1
#define laneh(i, n, d) WORD $(0x0DDF4000 | ((i)>>2)<<30 | (((i)>>1)&1)<<12 | ((i)&1)<<11 | (n)<<5 | (d)) // ld1 {vd.h}[i], [xn], #2
#define lanes(i, n, d) WORD $(0x0DDF8000 | ((i)>>1)<<30 | ((i)&1)<<12 | (n)<<5 | (d)) // ld1 {vd.s}[i], [xn], #4
