// Instructions that the Go assembler has no name for, and some that it has, since macros take vectors by number.
// Operands are in Go's order: the result, vector d, comes last. All are of four float32, or of four integers, where
// nothing else is said.

#define vector3(op, m, n, d) WORD $((op) | (m)<<16 | (n)<<5 | (d))

#define fadd(m, n, d) vector3(0x4E20D400, m, n, d)  // fadd  vd.4s, vn.4s, vm.4s
#define fsub(m, n, d) vector3(0x4EA0D400, m, n, d)  // fsub  vd.4s, vn.4s, vm.4s: n - m
#define fmul(m, n, d) vector3(0x6E20DC00, m, n, d)  // fmul  vd.4s, vn.4s, vm.4s
#define fmla(m, n, d) vector3(0x4E20CC00, m, n, d)  // fmla  vd.4s, vn.4s, vm.4s: d + n m
#define fmax(m, n, d) vector3(0x4E20F400, m, n, d)  // fmax  vd.4s, vn.4s, vm.4s: NaN if one is
#define faddp(m, n, d) vector3(0x6E20D400, m, n, d) // faddp vd.4s, vn.4s, vm.4s: sums of neighbours, n's first
#define fcmgt(m, n, d) vector3(0x6EA0E400, m, n, d) // fcmgt vd.4s, vn.4s, vm.4s: all bits where n > m
#define add(m, n, d) vector3(0x4EA08400, m, n, d)   // add   vd.4s, vn.4s, vm.4s
#define bic(m, n, d) vector3(0x4E601C00, m, n, d)   // bic   vd.16b, vn.16b, vm.16b: n, but 0 where m
#define mov(n, d) vector3(0x4EA01C00, n, n, d)      // mov   vd.16b, vn.16b
#define shl23(n, d) vector3(0x4F375400, 0, n, d)    // shl   vd.4s, vn.4s, #23
#define fmaxv(n, d) vector3(0x6E30F800, 0, n, d)    // fmaxv sd, vn.4s: NaN if one is

// fmla vd.4s, vn.4s, vm.s[i]: d + n times element i of m
#define fmlaby(i, m, n, d) vector3(0x4F801000 | ((i)&1)<<21 | ((i)>>1)<<11, m, n, d)

// The same of two float64, or of two integers.

#define fadd64(m, n, d) vector3(0x4E60D400, m, n, d)  // fadd  vd.2d, vn.2d, vm.2d
#define fsub64(m, n, d) vector3(0x4EE0D400, m, n, d)  // fsub  vd.2d, vn.2d, vm.2d: n - m
#define fmul64(m, n, d) vector3(0x6E60DC00, m, n, d)  // fmul  vd.2d, vn.2d, vm.2d
#define fmla64(m, n, d) vector3(0x4E60CC00, m, n, d)  // fmla  vd.2d, vn.2d, vm.2d: d + n m
#define fmax64(m, n, d) vector3(0x4E60F400, m, n, d)  // fmax  vd.2d, vn.2d, vm.2d: NaN if one is
#define faddp64(m, n, d) vector3(0x6E60D400, m, n, d) // faddp vd.2d, vn.2d, vm.2d: sums of neighbours, n's first
#define fcmgt64(m, n, d) vector3(0x6EE0E400, m, n, d) // fcmgt vd.2d, vn.2d, vm.2d: all bits where n > m
#define add64(m, n, d) vector3(0x4EE08400, m, n, d)   // add   vd.2d, vn.2d, vm.2d
#define shl52(n, d) vector3(0x4F745400, 0, n, d)      // shl   vd.2d, vn.2d, #52
#define fmaxp64(n, d) vector3(0x7E70F800, 0, n, d)    // fmaxp dd, vn.2d: NaN if one is

// fmla vd.2d, vn.2d, vm.d[i]: d + n times element i of m
#define fmlaby64(i, m, n, d) vector3(0x4FC01000 | (i)<<11, m, n, d)
