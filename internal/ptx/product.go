package ptx

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/leanattention/internal/half"
)

// groupProducts holds a warp's part of its warp group's products. open has no group yet.
type groupProducts struct {
	open   []func()
	closed [][]func()
}

func (g *groupProducts) any() bool {
	return len(g.open) > 0 || slices.ContainsFunc(g.closed, func(f []func()) bool { return len(f) > 0 })
}

func (g *groupProducts) settle(n int) {
	for len(g.closed) > n {
		for _, f := range g.closed[0] {
			f()
		}
		g.closed = slices.Delete(g.closed, 0, 1)
	}
}

func f32(x uint32) float64 { return float64(math.Float32frombits(x)) }

// groupElements is the type of the operands of a warp group's product.
type groupElements struct {
	bytes int
	wide  func(x uint16) float32
	sums  string
}

// groupKinds are the types that products of warp groups have.
var groupKinds = map[string]*groupElements{
	"f16.f16":   {2, func(x uint16) float32 { return half.Float16(x).Float32() }, "f32"},
	"bf16.bf16": {2, func(x uint16) float32 { return half.BFloat16(x).Float32() }, "f32"},
	"e4m3.e4m3": {1, func(x uint16) float32 { return half.E4M3(x).Float32() }, "f32"},
	"s8.s8":     {1, func(x uint16) float32 { return float32(int8(x)) }, "s32"},
}

// depth is the inner dimension of a product: 32 bytes of elements.
func (e *groupElements) depth() int { return 32 / e.bytes }

// unpack converts 16 bytes of elements.
func (e *groupElements) unpack(to []float32, from *[16]byte) {
	for i := range 16 / e.bytes {
		x := uint16(from[i*e.bytes])
		if e.bytes == 2 {
			x |= uint16(from[2*i+1]) << 8
		}
		to[i] = e.wide(x)
	}
}

// product compiles the tensor core products and their companion instructions.
func (c *compiler) product(s *statement) func(w *warp, m uint32) {
	name := strings.Join(s.op, ".")
	switch {
	case name == "ldmatrix.sync.aligned.m8n8.x4.shared.b16", name == "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16":
		return c.loadMatrix(s, s.has("trans"))
	case name == "movmatrix.sync.aligned.m8n8.trans.b16":
		return c.moveMatrix(s)
	case name == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", name == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32":
		if s.has("bf16") {
			return c.mma(s, bfloat16, 16)
		}
		return c.mma(s, float16, 16)
	case name == "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32":
		return c.mma(s, tf32, 8)
	case name == "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", name == "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32":
		return c.mmaBytes(s)
	case strings.HasPrefix(name, "wgmma.mma_async.sync.aligned.m64n"):
		return c.groupProduct(s)
	case name == "wgmma.fence.sync.aligned":
		return func(w *warp, m uint32) {}
	case name == "wgmma.commit_group.sync.aligned":
		return func(w *warp, m uint32) { w.closed, w.groupProducts.open = append(w.closed, w.groupProducts.open), nil }
	case name == "wgmma.wait_group.sync.aligned":
		n := c.constantArgument(0)
		return func(w *warp, m uint32) { w.settle(n) }
	}
	return nil
}

// registers returns the n registers of a list.
func (c *compiler) registers(o *operand, n int) []register {
	if len(o.list) != n {
		c.fail("%d registers, want %d", len(o.list), n)
	}
	var all []register
	for i := range o.list {
		all = append(all, c.dst(&o.list[i], 32))
	}
	return all
}

// loadMatrix compiles ldmatrix: four matrices of 8 rows of 16 bytes. Eight threads hold the row addresses of
// each matrix.
func (c *compiler) loadMatrix(s *statement, transposed bool) func(w *warp, m uint32) {
	c.need(2)
	d, a := c.registers(&s.args[0], 4), c.address(&s.args[1], sharedSpace)
	return func(w *warp, m uint32) {
		var x [4][lanes]uint32 // matrices, with rows of four words
		for l := range lanes {
			*(*[4]uint32)(x[l/8][l%8*4:]) = *(*[4]uint32)(w.at(sharedSpace, a.at(w, l), l, 16))
		}
		for i, r := range d {
			x, to := &x[i], w.d(r)
			if !transposed {
				*to = *x
				continue
			}
			for l := range lanes {
				row, column := l/4, l%4*2
				lo, hi := x[column*4+row/2]>>(row%2*16), x[column*4+4+row/2]>>(row%2*16)
				to[l] = hi<<16 | lo&0xffff
			}
		}
	}
}

// moveMatrix compiles the transposition of an 8x8 matrix. Each thread holds two elements.
func (c *compiler) moveMatrix(s *statement) func(w *warp, m uint32) {
	c.need(2)
	d, a := c.dst(&s.args[0], 32), c.src32(&s.args[1])
	return func(w *warp, m uint32) {
		var x [8][8]uint32
		for l := range lanes {
			v := w.d(a)[l]
			x[l/4][l%4*2], x[l/4][l%4*2+1] = v&0xffff, v>>16
		}
		for l := range lanes {
			w.d(d)[l] = x[l%4*2][l/4] | x[l%4*2+1][l/4]<<16
		}
	}
}

// elements is the type of a product's operands.
type elements uint8

const (
	float16 elements = iota
	bfloat16
	tf32
)

// unpack converts a register to numbers: two per thread for 16-bit types, and one for 32-bit types.
func (e elements) unpack(r *[lanes]uint32, x *[2 * lanes]float64) {
	switch e {
	case float16:
		for l, v := range r {
			x[2*l], x[2*l+1] = float64(half.Float16(v).Float32()), float64(half.Float16(v>>16).Float32())
		}
	case bfloat16:
		for l, v := range r {
			x[2*l], x[2*l+1] = f32(v<<16), f32(v&0xffff0000)
		}
	default:
		for l, v := range r {
			x[l] = f32(v &^ 0x1fff)
		}
	}
}

// mma compiles a product of 16 rows by 8 columns with the given inner dimension. Four threads hold a row, or
// a column.
func (c *compiler) mma(s *statement, kind elements, depth int) func(w *warp, m uint32) {
	c.need(4)
	d, a, b, e := c.registers(&s.args[0], 4), c.registers(&s.args[1], 4), c.registers(&s.args[2], 2), c.registers(&s.args[3], 4)
	n := depth / 2 // elements of a row per register
	return func(w *warp, m uint32) {
		var x [16][16]float64 // rows
		var y [16][8]float64  // columns, side by side
		var z [2 * lanes]float64
		for i, r := range a {
			kind.unpack(w.d(r), &z)
			for row := range 8 {
				copy(x[row+i%2*8][i/2*n:][:n], z[row*n:])
			}
		}
		for i, r := range b {
			kind.unpack(w.d(r), &z)
			for column := range 8 {
				for k, v := range z[column*n:][:n] {
					y[k+i*n][column] = v
				}
			}
		}
		var sums [4][lanes]uint32
		for row := range 16 {
			sum := rowTimes(x[row][:depth], &y)
			for i := range 2 {
				sums, e := &sums[row/8*2+i], w.d(e[row/8*2+i])
				for j := range 4 {
					l := row%8*4 + j
					sums[l] = bitsOf(sum[2*j+i] + f32(e[l]))
				}
			}
		}
		for i, r := range d {
			*w.d(r) = sums[i]
		}
	}
}

// mmaBytes compiles a product of 16 rows by 8 columns of 32 bytes. Sums are integers that wrap. Bytes of the right operand are signed, and bytes
// of the left operand are signed or not. Four threads hold a row or a column, and each thread has four bytes of either half.
func (c *compiler) mmaBytes(s *statement) func(w *warp, m uint32) {
	c.need(4)
	d, a, b, e := c.registers(&s.args[0], 4), c.registers(&s.args[1], 4), c.registers(&s.args[2], 2), c.registers(&s.args[3], 4)
	signs := s.op[7] == "s8"
	return func(w *warp, m uint32) {
		var x, y [16][32]int32 // rows, and columns
		unpack := func(to *[32]int32, first int, v uint32, signs bool) {
			for i := range 4 {
				n := uint8(v >> (8 * i))
				if signs {
					to[first+i] = int32(int8(n))
				} else {
					to[first+i] = int32(n)
				}
			}
		}
		for i, r := range a {
			for l, v := range w.d(r) {
				unpack(&x[l/4+i%2*8], i/2*16+l%4*4, v, signs)
			}
		}
		for i, r := range b {
			for l, v := range w.d(r) {
				unpack(&y[l/4], i*16+l%4*4, v, true)
			}
		}
		var sums [4][lanes]uint32
		for i := range sums {
			for l := range lanes {
				sum := int32(w.d(e[i])[l])
				row, column := &x[l/4+i/2*8], &y[l%4*2+i%2]
				for k, v := range row {
					sum += v * column[k]
				}
				sums[i][l] = uint32(sum)
			}
		}
		for i, r := range d {
			*w.d(r) = sums[i]
		}
	}
}

// rowTimes multiplies a row by eight columns, which are stored side by side.
func rowTimes(x []float64, y *[16][8]float64) (sum [8]float64) {
	var s0, s1, s2, s3, s4, s5, s6, s7 float64
	for k, v := range x[:min(len(x), len(y))] {
		c := &y[k]
		s0 += v * c[0]
		s1 += v * c[1]
		s2 += v * c[2]
		s3 += v * c[3]
		s4 += v * c[4]
		s5 += v * c[5]
		s6 += v * c[6]
		s7 += v * c[7]
	}
	return [8]float64{s0, s1, s2, s3, s4, s5, s6, s7}
}

// groupProduct compiles a warp's 16 rows of a warp group's 64 rows, by n columns, with an inner dimension of 32 bytes: 16 elements, or 32
// of a byte. The left operand is in shared memory or in registers, and the right operand in shared memory. Rows in shared memory are the
// rows or columns of the product or, if transposed, run along the inner dimension. The product is computed at once, because the compiler
// moves the sums before they are complete, which the hardware's assembler undoes. At the wait, the operands are compared with their values
// at the start.
func (c *compiler) groupProduct(s *statement) func(w *warp, m uint32) {
	if len(s.op) != 8 {
		return nil
	}
	kind := groupKinds[s.op[6]+"."+s.op[7]]
	if kind == nil || s.op[5] != kind.sums {
		return nil
	}
	bytes, integers := kind.bytes == 1, kind.sums == "s32"
	n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(s.op[4], "m64n"), "k"+strconv.Itoa(kind.depth())))
	if err != nil || n%8 != 0 || n < 8 || n > 256 {
		return nil
	}
	transposed := false
	is := func(first int, want ...int) bool {
		return slices.IndexFunc(want, func(x int) bool { first++; return c.constantArgument(first-1) != x }) < 0
	}
	var operand func(w *warp) func() [][32]float32
	var adds func(w *warp) bool
	inRegisters := len(s.args) == 7
	if bytes {
		want := 6 // d, a, b, whether d is added, and the factors of a and b, which integers have not
		if integers {
			want = 4
		}
		inRegisters = true
		if len(s.args) != want || len(s.args[1].list) != 4 || !integers && !is(4, 1, 1) {
			return nil
		}
	} else if len(s.args) != 8 && len(s.args) != 7 {
		return nil
	}
	d, b := c.registers(&s.args[0], n/2), c.src64(&s.args[2])
	if !inRegisters {
		transposed = is(7, 1)
		left := is(6, 1)
		if !is(4, 1, 1) || !left && !is(6, 0) || !transposed && !is(7, 0) {
			return nil
		}
		a, more := c.src64(&s.args[1]), c.predicate(&s.args[3])
		operand = func(w *warp) func() [][32]float32 {
			descriptor, first := uniform64(w, a), w.id%4*16
			return func() [][32]float32 {
				if left {
					return readTransposed(w, descriptor, first, 16, kind)
				}
				return readOperand(w, descriptor, first, 16, kind)
			}
		}
		adds = func(w *warp) bool {
			if p := w.p[more]; p != 0 && p != all {
				w.fail("threads differ")
			}
			return w.p[more] != 0
		}
	} else {
		if !is(3, 0) && !is(3, 1) {
			return nil
		}
		if !bytes {
			if transposed = is(6, 1); !is(4, 1, 1) || !transposed && !is(6, 0) {
				return nil
			}
		}
		a, more := c.registers(&s.args[1], 4), is(3, 1)
		operand = func(w *warp) func() [][32]float32 {
			return func() [][32]float32 { return registerOperand(w, a, kind) }
		}
		adds = func(*warp) bool { return more }
	}
	depth := kind.depth()
	return func(w *warp, m uint32) {
		descriptor := uniform64(w, b)
		right := func() [][32]float32 {
			if transposed {
				return readTransposed(w, descriptor, 0, n, kind)
			}
			return readOperand(w, descriptor, 0, n, kind)
		}
		left := operand(w)
		x, y, adds := left(), right(), adds(w)
		for l := range lanes {
			for i, r := range d {
				row, column := x[l/4+i%4/2*8][:depth], y[i/4*8+l%4*2+i%2][:depth]
				var sum float64
				for k, v := range row {
					sum += float64(v) * float64(column[k])
				}
				to := &w.d(r)[l]
				switch {
				case integers && adds:
					*to += uint32(int32(sum))
				case integers:
					*to = uint32(int32(sum))
				case adds:
					*to = bitsOf(sum + f32(*to))
				default:
					*to = bitsOf(sum)
				}
			}
		}
		w.groupProducts.open = append(w.groupProducts.open, func() {
			if !same(x, left()) || !same(y, right()) {
				w.fail("an operand has changed before the product was waited for")
			}
		})
	}
}

// uniform64 returns the value of a register that must be equal in all threads.
func uniform64(w *warp, r register) uint64 {
	for l := range lanes {
		if w.q(r)[l] != w.q(r)[0] {
			w.fail("threads differ")
		}
	}
	return w.q(r)[0]
}

// registerOperand returns a warp's 16 rows of elements from the threads' registers, which have four bytes of a row each.
func registerOperand(w *warp, a []register, kind *groupElements) [][32]float32 {
	x := make([][32]float32, 16)
	each := 4 / kind.bytes
	for i, r := range a {
		for l := range lanes {
			v := w.d(r)[l]
			row, k := l/4+i%2*8, l%4*each+i/2*4*each
			for j := range each {
				e := v >> (8 * kind.bytes * j)
				if kind.bytes == 1 {
					e &= 0xff
				}
				x[row][k+j] = kind.wide(uint16(e))
			}
		}
	}
	return x
}

// readTransposed reads n columns, from column first on, of an operand with 16 rows. The columns are stored in
// swizzled blocks of 64 columns or, if n is 8, in rows of 16 bytes.
func readTransposed(w *warp, descriptor uint64, first, n int, kind *groupElements) [][32]float32 {
	start, block, stride := descriptor&0x3fff<<4, descriptor>>16&0x3fff<<4, descriptor>>32&0x3fff<<4
	plain := descriptor>>62 == 0
	// Without a swizzle, only the hardware defines which of the two strides leads to the next eight rows, so
	// both must be equal.
	if descriptor>>62 > 1 || descriptor>>49&7 != 0 || plain && (n != 8 || block != stride) {
		w.fail("an operand of another kind: %#x", descriptor)
	}
	x := make([][32]float32, n)
	for i := 0; i < n; i += 8 {
		column := first + i
		for k := range uint64(16) {
			at := start + k/8*stride + k%8*16
			if !plain {
				at = swizzled(start + uint64(column/64)*block + k/8*stride + k%8*128 + uint64(column%64*2))
			}
			for j, e := range (*[8]uint16)(w.at(sharedSpace, at, 0, 16)) {
				x[i+j][k] = kind.wide(e)
			}
		}
	}
	return x
}

// same compares bits, because the operands may contain NaN.
func same(x, y [][32]float32) bool {
	return slices.EqualFunc(x, y, func(a, b [32]float32) bool {
		for i := range a {
			if math.Float32bits(a[i]) != math.Float32bits(b[i]) {
				return false
			}
		}
		return true
	})
}

// readOperand reads rows of 32 bytes of an operand that a descriptor describes.
func readOperand(w *warp, descriptor uint64, first, rows int, kind *groupElements) [][32]float32 {
	start, stride := descriptor&0x3fff<<4, descriptor>>32&0x3fff<<4
	if descriptor>>62 != 1 || descriptor>>49&7 != 0 {
		w.fail("an operand of another kind: %#x", descriptor)
	}
	x := make([][32]float32, rows)
	for r := range rows {
		row := uint64(first + r)
		for k := range 2 {
			at := swizzled(start + row/8*stride + row%8*128 + uint64(k*16))
			kind.unpack(x[r][k*16/kind.bytes:], (*[16]byte)(w.at(sharedSpace, at, 0, 16)))
		}
	}
	return x
}

// bitsOf returns the bits of a sum rounded to float32.
func bitsOf(x float64) uint32 { return math.Float32bits(float32(x)) }
