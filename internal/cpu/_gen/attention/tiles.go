package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Matrix work on tile registers (AMX), for up to 16 rows and keys and values of bfloat16. Products of tiles are
// of bfloat16, which has 8 bits of a float32's 24: queries and weights are each a sum of three parts, so that no
// bit of a factor is lost, and sums are in float32. Keys go from memory to tile registers as they are.

const (
	tileRows  = 16
	tileBytes = 64 * tileRows
	tileParts = 3  // of a float32
	tileDims  = 32 // dims are multiples of it: a cache line
)

// leading has the bits of a float32 that are a bfloat16's.
func leading() VecVirtual {
	v := ZMM()
	VPBROADCASTD(tileConstant("leading", 0xffff0000), v)
	return v
}

var tileConstants = map[string]Mem{}

func tileConstant(name string, words ...uint32) Mem {
	if _, ok := tileConstants[name]; !ok {
		tileConstants[name] = GLOBL(name, RODATA|NOPTR)
		for i, w := range words {
			DATA(4*i, U32(w))
		}
	}
	return tileConstants[name]
}

// split returns the leading bits of x and replaces x by what they leave. The last part leaves nothing.
func split(x, mask VecVirtual, part int) VecVirtual {
	if part == tileParts-1 {
		return x
	}
	h := ZMM()
	VPANDD(mask, x, h)
	VSUBPS(h, x, x)
	return h
}

// odds sees whether numbers are not finite: 0 times them is NaN, and so is the sum of all.
type odds struct{ zero, sum VecVirtual }

func newOdds() *odds {
	o := &odds{ZMM(), ZMM()}
	zero(o.zero, o.sum)
	return o
}

func (o *odds) see(x VecVirtual) { VFMADD231PS(x, o.zero, o.sum) }

// seen returns 0 if all numbers were finite.
func (o *odds) seen() GPVirtual {
	k, n := K(), GP64()
	VCMPPS(U8(cmpUnordered), o.sum, o.sum, k)
	KMOVW(k, n.As32())
	return n
}

// queryTiles makes the kernel that splits queries into tiles.
func queryTiles() {
	function("queryTilesBF16AMX", "func(tiles, q *float32, rows, dim int)",
		"for r < rows, i < dim, p < 3, with h_0 the leading 8 bits of q[r*dim+i], h_1 those of what it leaves, h_2 the rest:",
		"",
		"	element 32*(48*(i/32)+16*p+i%32/2) + 2*r + i%2 of tiles, as bfloat16 = h_p",
		"",
		fmt.Sprintf("rows is at most %d, dim a multiple of %d.", tileRows, tileDims))
	to, q, left, dim := param("tiles"), param("q"), param("rows"), param("dim")
	mask, index, high := leading(), ZMM(), ZMM()
	var rows, words []uint32 // where a row's pairs go; the upper words of 32 elements
	for i := range uint32(16) {
		rows = append(rows, 64*i)
		words = append(words, 4*i+1|(4*i+3)<<16)
	}
	VMOVDQU32(tileConstant("tileRows", rows...), index)
	VMOVDQU32(tileConstant("highWords", words...), high)
	row := label()
	Label(row)
	t, n, chunk := GP64(), GP64(), label()
	MOVQ(to, t)
	MOVQ(dim, n)
	Label(chunk)
	x := avx512.vecs(2)
	for i := range x {
		VMOVUPS(at(q, 64*i), x[i])
	}
	for p := range tileParts {
		pairs, all := ZMM(), K()
		VMOVDQA32(high, pairs)
		VPERMI2W(x[1], x[0], pairs)
		for i := range x {
			split(x[i], mask, p)
		}
		KXNORW(all, all, all)
		VPSCATTERDD(pairs, all, Mem{Base: t, Index: index, Scale: 1, Disp: p * tileBytes})
	}
	ADDQ(U32(128), q)
	ADDQ(U32(tileParts*tileBytes), t)
	SUBQ(U8(tileDims), n)
	JG(LabelRef(chunk))
	ADDQ(U8(4), to)
	SUBQ(U8(1), left)
	JG(LabelRef(row))
	VZEROUPPER()
	RET()
}

// Of scores a tile for each of the four streams is computed together: keys are the rows, queries the columns.
const (
	scoreKeys  = 4 * tileRows
	scoreStage = 4 * tileBytes // for the scores, a key in 64 bytes
)

// scoreTiles makes the kernel of scores.
func scoreTiles() {
	function("scoreTilesBF16AMX", "func(s, tiles *float32, k **byte"+
		", at, rows, count, dim, stride, step int, ahead **byte, aheadAt, aheadStep int, wide *float32) (odd int)",
		"for r < rows, c < count:",
		"",
		"	s[r*stride+c] = sum_i q_r[i] k_c[i]",
		"",
		"where k_c lies at k[c%4] + at + c/4*step, and queries in tiles as queryTilesBF16AMX makes them.",
		aheadDoc,
		fmt.Sprintf("rows is at most %d, count a multiple of %d, dim of %d. wide is scratch of %d elements.",
			tileRows, scoreKeys, tileDims, scoreStage/4),
		"It returns 0 if all scores are finite. Else they are of no use: an infinity may have become NaN.")
	off, aheadOff, aheadRow := local(param("at")), local(param("aheadAt")), AllocLocal(8)
	scores, left := local(param("s")), local(param("count"))
	t := GP64()
	LEAQ(tileConfig(16), t)
	loadTileConfig(t)
	odd := newOdds()
	again := label()
	Label(again)
	scoreProducts(off, aheadOff)
	t = param("aheadStep")
	IMUL3Q(U8(tileRows-4), t, t)
	ADDQ(aheadOff, t)
	MOVQ(t, aheadRow)
	scoreRows(odd, scores, aheadRow)
	for _, x := range []struct {
		step string
		off  Mem
	}{{"step", off}, {"aheadStep", aheadOff}} {
		t = param(x.step)
		SHLQ(U8(4), t)
		ADDQ(t, x.off)
	}
	ADDQ(U32(4*scoreKeys), scores)
	SUBQ(U8(scoreKeys), left)
	JG(LabelRef(again))
	n := odd.seen()
	releaseTiles()
	VZEROUPPER()
	Store(n, Return("odd"))
	RET()
}

// scoreProducts leaves the scores of scoreKeys keys in wide.
func scoreProducts(off, aheadOff Mem) {
	const a, b = 7, 4 // tile registers: a stream's keys, and parts of queries; below 4 are sums
	for i := range 4 {
		zeroTile(i)
	}
	query, left, ld := param("tiles"), param("dim"), GP64()
	MOVQ(U32(64), ld)
	j, ahead := GP64(), GP64()
	MOVQ(off, j)
	MOVQ(aheadOff, ahead)
	// What lies ahead is asked for in the order of memory, all streams alike, as products allow; in the order of
	// the tiles it comes a fifth slower. If rows there touch each other these are three lines of each stream with
	// each tile, else those of three rows. The last four of 16 rows are left to scoreRows.
	line, line3, back := param("aheadStep"), GP64(), GP64()
	IMUL3Q(I8(-(tileRows - 4)), line, back)
	ADDQ(U8(64), back) // from a chunk to the next
	t := param("dim")
	SHLQ(U8(1), t)
	SUBQ(line, t)
	CMOVQEQ(t, back)
	CMOVQEQ(ld, line)
	LEAQ(Mem{Base: line, Index: line, Scale: 2}, line3)
	chunk := label()
	Label(chunk)
	for p := range tileParts {
		loadTile(query, ld, b+p)
		ADDQ(U32(tileBytes), query)
	}
	for i := range 4 {
		x, step := param("k"), param("step")
		MOVQ(at(x, 8*i), x)
		ADDQ(j, x)
		loadTile(x, step, a)
		for p := tileParts - 1; p >= 0; p-- {
			multiplyTiles(a, b+p, i)
		}
		next := param("ahead")
		for n := range 4 {
			y := GP64()
			MOVQ(at(next, 8*n), y)
			ADDQ(ahead, y)
			for r := range 3 {
				PREFETCHT0(row(y, line, line3, r))
			}
		}
		ADDQ(line3, ahead)
	}
	ADDQ(U8(64), j)
	ADDQ(back, ahead)
	SUBQ(U8(tileDims), left)
	JG(LabelRef(chunk))
	x := param("wide")
	MOVQ(U32(256), ld)
	for i := range 4 {
		storeTile(i, x, ld)
		ADDQ(U8(64), x)
	}
}

// scoreRows puts the scores in wide, where a key has those of all rows together, into rows, 8 at a time.
func scoreRows(odd *odds, scores, aheadRow Mem) {
	stage, to, rows, stride := param("wide"), GP64(), param("rows"), param("stride")
	MOVQ(scores, to)
	SHLQ(U8(2), stride)
	eight, done := label(), label()
	Label(eight)
	from, out, n := GP64(), GP64(), GP64()
	MOVQ(stage, from)
	MOVQ(to, out)
	MOVQ(U32(scoreKeys/16), n)
	sixteen, next := label(), label()
	Label(sixteen)
	// With each 16 keys a row ahead of each stream.
	j, end, line := GP64(), param("dim"), label()
	MOVQ(aheadRow, j)
	LEAQ(Mem{Base: j, Index: end, Scale: 2}, end)
	Label(line)
	ahead := param("ahead")
	for i := range 4 {
		y := GP64()
		MOVQ(at(ahead, 8*i), y)
		PREFETCHT0(Mem{Base: y, Index: j, Scale: 1})
	}
	ADDQ(U8(64), j)
	CMPQ(j, end)
	JL(LabelRef(line))
	ADDQ(param("aheadStep"), aheadRow)

	v := avx512.vecs(8)
	for i := range v {
		c := i/4*8 + i%4
		VMOVUPS(at(from, 64*c), v[i].AsY())
		VINSERTF64X4(U8(1), at(from, 64*(c+4)), v[i], v[i])
	}
	w := avx512.transposeLanes(v)
	row := GP64()
	MOVQ(out, row)
	for r := range 8 {
		if r > 0 {
			CMPQ(rows, U8(r))
			JLE(LabelRef(next))
		}
		x := ZMM()
		VSHUFF32X4(U8(0x88+0x55*(r/4)), w[4+r%4], w[r%4], x)
		odd.see(x)
		VMOVUPS(x, at(row, 0))
		ADDQ(stride, row)
	}
	Label(next)
	ADDQ(U32(16*64), from)
	ADDQ(U8(64), out)
	SUBQ(U8(1), n)
	JG(LabelRef(sixteen))
	SUBQ(U8(8), rows)
	JLE(LabelRef(done))
	ADDQ(U8(32), stage)
	LEAQ(Mem{Base: to, Index: stride, Scale: 8}, to)
	JMP(LabelRef(eight))
	Label(done)
}

// Of weighted sums the weights are the rows and the values the columns, 32 keys at a time: a tile of values has
// 16 elements of each. A panel of columns goes through all keys, with its sums in tile registers.
const (
	weightKeys    = 32
	weightPanel   = 4                                     // tiles
	weightTiles   = (tileParts + weightPanel) * tileBytes // of a turn: weights, then values
	weightedStage = 2 * weightTiles
)

// weightedTiles makes the kernel of weighted sums.
func weightedTiles() {
	w := new(inTiles)
	function("weightedTilesBF16AMX", "func(o, p *float32, v **byte, at, rows, count, dim, stride, step int"+
		", ahead **byte, aheadAt, aheadStep int, wide *float32) (odd int)",
		"for r < rows, i < dim:",
		"",
		"	o[r*dim+i] += sum_c p[r*stride+c] v_c[i]   (c < count)",
		"",
		"where v_c lies at v[c%4] + at + c/4*step.", aheadDoc,
		fmt.Sprintf("rows is at most %d, count a multiple of %d, dim of %d. wide is scratch of %d + %d*dim elements.",
			tileRows, weightKeys, tileDims, weightedStage/4, tileRows),
		"It returns 0 if all sums are finite. Else o is as it was: an infinity may have become NaN.")
	t, few := GP64(), GP64()
	LEAQ(tileConfig(16), t)
	LEAQ(tileConfig(8), few)
	rows := param("rows")
	CMPQ(rows, U8(8))
	CMOVQLE(few, t)
	loadTileConfig(t)
	w.mask = leading()

	x := param("wide")
	ADDQ(U32(weightedStage), x)
	w.sums, w.off, w.aheadOff = local(x), local(param("at")), local(param("aheadAt"))
	columns := local(param("dim"))
	apart := param("dim") // as in weightedBlock
	SHLQ(U8(1), apart)
	SUBQ(param("aheadStep"), apart)
	w.gap = local(apart)
	for _, tiles := range []int{weightPanel, tileDims / 16} {
		again, fewer := label(), label()
		Label(again)
		CMPQ(columns, U8(16*tiles))
		JL(LabelRef(fewer))
		w.columns(tiles)
		SUBQ(U8(16*tiles), columns)
		JMP(LabelRef(again))
		Label(fewer)
	}
	releaseTiles()
	w.add()
}

// inTiles is what the parts of a weightedTiles kernel share.
type inTiles struct {
	mask                VecVirtual
	sums, off, aheadOff Mem // where the panel begins: in the sums, in a row of values, and in what lies ahead
	gap                 Mem // 0 if rows ahead touch each other
}

// columns computes the sums of a panel of so many tiles, and moves to the next.
func (w *inTiles) columns(tiles int) {
	const a, b = weightPanel, 7 // tile registers: parts of weights, and values; those before are sums
	width := 32 * tiles
	t, step := GP64(), param("aheadStep")
	MOVQ(U32(width), t)
	CMPQ(w.gap, U8(0))
	CMOVQEQ(t, step)
	aheadStep := local(step)
	p, left := local(param("p")), local(param("count"))
	copied := func(m Mem) Mem {
		t := GP64()
		MOVQ(m, t)
		return local(t)
	}
	off, ahead := copied(w.off), copied(w.aheadOff)
	// While the products of some keys are computed, those of the next are put into tiles: a load of a tile waits for
	// its stores.
	x, y := param("wide"), GP64()
	LEAQ(at(x, weightTiles), y)
	now, next := local(x), local(y)
	for i := range tiles {
		zeroTile(i)
	}
	w.weights(p, now)
	for s := range 4 {
		w.values(tiles, s, off, now)
	}
	again := label()
	Label(again)
	// Behind the last keys they come once more, to no purpose.
	t, step, zero := param("step"), GP64(), GP64()
	SHLQ(U8(3), t)
	MOVQ(U32(4*weightKeys), step)
	XORQ(zero, zero)
	SUBQ(U8(weightKeys), left)
	CMOVQLE(zero, t)
	CMOVQLE(zero, step)
	ADDQ(t, off)
	ADDQ(step, p)

	x, ld := GP64(), GP64()
	MOVQ(now, x)
	MOVQ(U32(64), ld)
	for i := range tileParts {
		loadTile(x, ld, a+i)
		ADDQ(U32(tileBytes), x)
	}
	w.weights(p, next)
	for s := range 4 {
		if s < tiles {
			loadTile(x, ld, b)
			ADDQ(U32(tileBytes), x)
			for i := tileParts - 1; i >= 0; i-- {
				multiplyTiles(a+i, b, s)
			}
		}
		w.prefetch(tiles, ahead, aheadStep)
		w.values(tiles, s, off, next)
	}
	x, y = GP64(), GP64()
	MOVQ(now, x)
	MOVQ(next, y)
	MOVQ(x, next)
	MOVQ(y, now)
	CMPQ(left, U8(0))
	JG(LabelRef(again))

	x, ld = GP64(), param("dim")
	MOVQ(w.sums, x)
	SHLQ(U8(2), ld)
	for c := range tiles {
		storeTile(c, x, ld)
		ADDQ(U8(64), x)
	}
	MOVQ(x, w.sums)
	ADDQ(U32(width), w.off)
	t, step = param("count"), GP64()
	SHRQ(U8(2), t)
	IMUL3Q(U32(width), t, t)
	MOVQ(U32(width), step)
	CMPQ(w.gap, U8(0))
	CMOVQNE(step, t)
	ADDQ(t, w.aheadOff)
}

// weights puts the parts of the rows' weights at p into tiles: keys i and i+16 are a pair.
func (w *inTiles) weights(p, stage Mem) {
	const orAnd = 0xf8 // a | b & c
	from, to, left, stride := GP64(), GP64(), param("rows"), param("stride")
	MOVQ(p, from)
	MOVQ(stage, to)
	SHLQ(U8(2), stride)
	again := label()
	Label(again)
	x := avx512.vecs(2)
	for i := range x {
		VMOVUPS(at(from, 64*i), x[i])
	}
	for part := range tileParts {
		low := ZMM()
		VPSRLD(U8(16), split(x[0], w.mask, part), low)
		VPTERNLOGD(U8(orAnd), w.mask, split(x[1], w.mask, part), low)
		VMOVDQU32(low, at(to, part*tileBytes))
	}
	ADDQ(stride, from)
	ADDQ(U8(64), to)
	SUBQ(U8(1), left)
	JG(LabelRef(again))
}

// values puts the values of those keys into tiles that stream s has.
func (w *inTiles) values(tiles, s int, off, stage Mem) {
	to, step, x, y := GP64(), param("step"), param("v"), GP64()
	MOVQ(stage, to)
	step3 := triple(step)
	MOVQ(at(x, 8*s), x)
	ADDQ(off, x)
	LEAQ(Mem{Base: x, Index: step, Scale: 4}, y) // 16 keys on
	for q := range 4 {
		first, second := row(x, step, step3, q), row(y, step, step3, q)
		for h := range tiles / 2 {
			first.Disp, second.Disp = 64*h, 64*h
			v, pairs := avx512.vecs(2), avx512.vecs(2)
			VMOVDQU32(first, v[0])
			VMOVDQU32(second, v[1])
			VPUNPCKLWD(v[1], v[0], pairs[0])
			VPUNPCKHWD(v[1], v[0], pairs[1])
			for i, z := range pairs {
				VMOVDQU32(z, at(to, (tileParts+2*h+i)*tileBytes+64*(4*q+s)))
			}
		}
	}
}

// prefetch asks for a quarter of what lies as far ahead as the keys of a turn.
func (w *inTiles) prefetch(tiles int, ahead, step Mem) {
	streams := param("ahead")
	for range weightKeys / 16 {
		x := GP64()
		MOVQ(ahead, x)
		for i := range 4 {
			y := GP64()
			MOVQ(at(streams, 8*i), y)
			for j := 0; j < 32*tiles; j += 64 {
				PREFETCHT0(Mem{Base: y, Index: x, Scale: 1, Disp: j})
			}
		}
		ADDQ(step, x)
		MOVQ(x, ahead)
	}
}

// add adds the sums to o if all are finite, and returns.
func (w *inTiles) add() {
	from, n, t := param("wide"), param("rows"), param("dim")
	ADDQ(U32(weightedStage), from)
	IMULQ(t, n)
	odd := newOdds()
	see, done := label(), label()
	x, left := GP64(), GP64()
	MOVQ(from, x)
	MOVQ(n, left)
	Label(see)
	v := ZMM()
	VMOVUPS(at(x, 0), v)
	odd.see(v)
	ADDQ(U8(64), x)
	SUBQ(U8(16), left)
	JG(LabelRef(see))
	seen := odd.seen()
	TESTQ(seen, seen)
	JNZ(LabelRef(done))

	// Two tiles have turns of 4 of 32 elements: 0-3, 8-11, ... and 4-7, 12-15, ...
	o, order := param("o"), avx512.vecs(2)
	for h := range order {
		var words []uint32
		for _, i := range []uint32{0, 1, 8, 9, 2, 3, 10, 11} {
			words = append(words, i+4*uint32(h), 0)
		}
		VMOVDQU32(tileConstant(fmt.Sprintf("turns%d", h), words...), order[h])
	}
	again := label()
	Label(again)
	y := avx512.vecs(2)
	for i := range y {
		VMOVUPS(at(from, 64*i), y[i])
	}
	for i := range order {
		z, m := ZMM(), at(o, 64*i)
		VMOVDQA32(order[i], z)
		VPERMI2PD(y[1], y[0], z)
		VADDPS(m, z, z)
		VMOVUPS(z, m)
	}
	ADDQ(U32(128), from)
	ADDQ(U32(128), o)
	SUBQ(U8(32), n)
	JG(LabelRef(again))
	Label(done)
	VZEROUPPER()
	Store(seen, Return("odd"))
	RET()
}
