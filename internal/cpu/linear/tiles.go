package linear

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/weight"
)

// Many rows are computed in tiles: some rows by some features, whose sums stay in registers for a part of In. A
// worker takes all rows of a block by as many features as fit its cache. It packs the weights of these features in
// the order of the tiles, a part of In at a time, and goes through the rows. So weights are read from memory once for
// a block of rows, and widened or split once.
//
// The order of a row's sums follows from In and the kernels: the bits of a row are the same for any other rows, as
// long as the rows are many.

const (
	// tileBlockRows is the largest number of rows of a block: packed x may be three times as large as x.
	tileBlockRows = 1024

	// tileIn is the least In that is worth packing.
	tileIn = 64
)

// tileRun is a linearRun as a task that computes tiles; splitRun is one that splits x for them.
type (
	tileRun  linearRun
	splitRun linearRun
)

// tilesFor returns the kernels of tiles for the given number of rows, or nil if the rows are few.
func (l *linearRun) tilesFor(rows int) (*matmul.Set, *matmul.Way) {
	if l.anyRows || l.in < tileIn || l.size != 4 || l.blocks.integer {
		return nil, nil
	}
	format := l.format
	if l.blocks.kernels != nil {
		format = weight.Float32
	}
	for t := l.kernels.tiles; t != nil; t = t.Fewer {
		w := &t.Ways[format]
		if r := t.Rounded[format]; l.roundX && r != nil {
			w = r
		}
		if w.Pack != nil && rows >= w.FromRows {
			return t, w
		}
	}
	return nil, nil
}

// eachInTiles computes the layers for many rows: layers of one x together, since x is split once for all of them.
func (l *linearRun) eachInTiles(e *cpu.Engine, rows int) error {
	all := l.layers
	defer func() { l.layers = all }()
	for from, to := 0, 1; from < len(all); from, to = to, to+1 {
		for to < len(all) && all[to].x == all[from].x && all[to].xRow == all[from].xRow {
			to++
		}
		l.layers = all[from:to]
		if err := l.inTiles(e, rows); err != nil {
			return err
		}
	}
	return nil
}

// inTiles computes layers of one x for many rows.
func (l *linearRun) inTiles(e *cpu.Engine, rows int) error {
	outs := 0
	for i := range l.layers {
		outs += l.layers[i].out
	}
	threads := cpu.ThreadsFor(cpu.WorkOf(0, float64(rows)*float64(l.in)*float64(outs)))
	for len(l.scratch) < threads {
		l.scratch = append(l.scratch, tileScratch{})
	}
	for i := range l.scratch[:threads] {
		s := &l.scratch[i]
		s.weights.Grow(l.tiles.Panels * l.tiles.PanelBytes(l.way))
	}
	blocks := (rows-1)/tileBlockRows + 1
	l.first = 0
	for b := range blocks {
		// A block's first row begins a tile, so that rows are split for one block at a time.
		end := rows
		if b+1 < blocks {
			end = ((b+1)*rows/blocks + l.tiles.Rows - 1) / l.tiles.Rows * l.tiles.Rows
		}
		l.rows = end - l.first
		if err := l.block(e, threads); err != nil {
			return err
		}
		l.first = end
	}
	return nil
}

// block computes a block of rows.
func (l *linearRun) block(e *cpu.Engine, threads int) error {
	if w := l.way; w.Split != nil {
		l.steps, l.strips = (l.in-1)/matmul.StepDepth+1, (l.rows-1)/matmul.StepRows+1
		l.split.Grow(l.strips * l.steps * w.XParts * matmul.StepBytes)
		// Strips are few: if each thread had only some, strips are cut across, too.
		l.across = max(min(splitsPerThread*threads/l.strips, l.steps/splitSteps), 1)
		l.next.Store(0)
		if err := e.Run((*splitRun)(l), min(threads, l.strips*l.across)); err != nil {
			return err
		}
	}
	l.cut(threads)
	l.next.Store(0)
	return e.Run((*tileRun)(l), min(threads, l.rowCuts*len(l.groups)))
}

const (
	splitsPerThread = 4
	splitSteps      = 16 // at least
)

// tileGroup is neighbouring features of a layer, or of all layers in turn.
type tileGroup struct{ layer, from, to int }

// cut cuts the block into pieces, each some rows by a group of features. Threads take one piece after the other.
// Threads differ in speed and may come late, so groups get smaller towards the end, down to a tile's features: half
// of the remaining work for each thread (guided self-scheduling, Polychronopoulos and Kuck 1987).
func (l *linearRun) cut(threads int) {
	t, layers := l.tiles, l.layers
	if l.inTurn {
		layers = layers[:1]
	}
	units := 0
	for i := range layers {
		units += (layers[i].out-1)/t.Outs + 1
	}
	best := math.MaxInt
	for cuts := 1; cuts == 1 || cuts <= 8 && l.rows/cuts >= 4*t.Rows; cuts++ {
		// Packing a weight takes as long as some rows of it. At the end a thread may be late by one piece.
		piece := (l.rows-1)/cuts + 1 + l.way.Packing
		if time := ((units*cuts-1)/threads + 2) * piece; time < best {
			best, l.rowCuts = time, cuts
		}
	}
	l.groups = l.groups[:0]
	for i := range layers {
		for from, out := 0, layers[i].out; from < out; {
			n := t.Panels
			if threads > 1 {
				n = min(max(units*l.rowCuts/(2*threads), 1), n)
			}
			to := min(from+n*t.Outs, out)
			l.groups = append(l.groups, tileGroup{i, from, to})
			units -= (to-from-1)/t.Outs + 1
			from = to
		}
	}
}

// Work splits x, 16 rows and a part of In at a time, until nothing is left.
func (s *splitRun) Work(i, _ int) {
	l := (*linearRun)(s)
	a := &l.scratch[i].pack
	a.DstStep, a.DstPart, a.SrcRow = l.way.XParts*matmul.StepBytes, matmul.StepBytes, l.layers[0].xRow
	for {
		j := int(l.next.Add(1)) - 1
		if j >= l.strips*l.across {
			return
		}
		row, part := j/l.across*matmul.StepRows, j%l.across
		step, end := part*l.steps/l.across, (part+1)*l.steps/l.across
		a.Dst = unsafe.Add(l.split.At, (row/matmul.StepRows*l.steps+step)*a.DstStep)
		a.Src = unsafe.Add(l.layers[0].x, (l.first+row)*a.SrcRow+step*matmul.StepDepth*l.size)
		a.Rows, a.N = min(matmul.StepRows, l.rows-row), min(end*matmul.StepDepth, l.in)-step*matmul.StepDepth
		l.way.Split(a)
	}
}

// Work computes pieces until none is left.
func (r *tileRun) Work(i, _ int) {
	l := (*linearRun)(r)
	for {
		j := int(l.next.Add(1)) - 1
		if j >= l.rowCuts*len(l.groups) {
			return
		}
		// Neighbouring pieces have the same weights, which are read from memory once.
		row, g := j%l.rowCuts, l.groups[j/l.rowCuts]
		p := tilePiece{linearRun: l, scratch: &l.scratch[i], from: g.from, to: g.to}
		// Rows are cut at the beginning of tiles, since split rows can't be cut elsewhere.
		tall := (l.rows-1)/l.tiles.Rows + 1
		p.top, p.end = row*tall/l.rowCuts*l.tiles.Rows, min((row+1)*tall/l.rowCuts*l.tiles.Rows, l.rows)
		layers := l.layers[g.layer : g.layer+1]
		if l.inTurn {
			layers = l.layers
		}
		for k := range layers {
			p.linearLayer = &layers[k]
			p.compute()
		}
	}
}

// tilePiece is some rows, counted from the block's first, by as many features as fit a worker's scratch.
type tilePiece struct {
	*linearRun
	*linearLayer
	scratch  *tileScratch
	top, end int // rows
	from, to int // features
}

// tileScratch is the scratch of a worker.
type tileScratch struct {
	weights cpu.Aligned
	edge    [tileEdge]float32 // a tile at an edge of y
	mul     matmul.Args
	pack    matmul.PackArgs
	dot     dotArgs
	blocks  blockScratch
	one     [dotStreams]float32
	_       [cpu.CacheLine]byte
}

// tileEdge is the largest number of elements of a tile.
const tileEdge = 32 * 32

func (p *tilePiece) compute() {
	for k := 0; k < p.in; k += p.way.Depth {
		n := min(p.way.Depth, p.in-k)
		p.packWeights(k, n)
		height := p.end - p.top
		tall := (height-1)/p.tiles.Rows + 1
		for i := range tall {
			row, end := p.top+i*height/tall, p.top+(i+1)*height/tall
			if p.way.Split != nil {
				row, end = p.top+i*p.tiles.Rows, min(p.top+(i+1)*p.tiles.Rows, p.end)
			}
			p.multiply(k, n, row, end)
		}
	}
	if p.way.Odd != nil {
		p.mend()
	}
	p.finish(p.linearLayer, p.first+p.top, p.end-p.top, p.from, p.to-p.from)
}

// packWeights packs n elements of the piece's features, from element k of In on.
func (p *tilePiece) packWeights(k, n int) {
	a, w, bytes := &p.scratch.pack, p.way, p.tiles.PanelBytes(p.way)
	a.SrcRow, a.N = p.wRow, n
	a.DstStep, a.DstPart = 4*p.tiles.Outs, 0
	group := 4 * w.Rows // bytes between the destinations of two calls
	if w.WParts > 0 {
		a.DstStep, a.DstPart, group = 2*w.WParts*matmul.StepBytes, 2*matmul.StepBytes, matmul.StepBytes
	}
	for o := p.from; o < p.to; o += w.Rows {
		at := o - p.from
		a.Dst = unsafe.Add(p.scratch.weights.At, at/p.tiles.Outs*bytes+at%p.tiles.Outs/w.Rows*group)
		a.Src = unsafe.Add(p.w, o*p.wRow+p.format.Size(k))
		a.Rows = min(w.Rows, p.to-o)
		if p.blocks.kernels != nil {
			a.Src, a.SrcRow = p.expandRows(&p.scratch.blocks, p.linearLayer, o, k, a.Rows, n)
		}
		w.Pack(a)
	}
}

// multiply computes the tiles of some rows, at most a tile's.
func (p *tilePiece) multiply(k, n, row, end int) {
	a, w, t := &p.scratch.mul, p.way, p.tiles
	rows, kernel := end-row, w.Mul[end-row]
	if w.Split == nil {
		a.N, a.XRow = n, p.xRow
		a.X = unsafe.Add(p.x, (p.first+row)*p.xRow+k*p.size)
	} else {
		kernel = w.Mul[t.Rows]
		a.N, a.XRow = (n-1)/matmul.StepDepth+1, p.steps*w.XParts*matmul.StepBytes
		a.X = unsafe.Add(p.split.At, (row/matmul.StepRows*p.steps+k/matmul.StepDepth)*w.XParts*matmul.StepBytes)
		if rows <= matmul.StepRows {
			a.XRow = 0 // there is one row
		}
	}
	a.Rows, a.More = rows, min(k, 1)
	bytes := t.PanelBytes(w)
	a.Tiles, a.WStep, a.Tall = 1, bytes, 1
	for o := p.from; o < p.to; o += t.Outs * a.Tiles {
		a.W = unsafe.Add(p.scratch.weights.At, (o-p.from)/t.Outs*bytes)
		y := unsafe.Add(p.y, (p.first+row)*p.yRow+o*p.size)
		outs := min(t.Outs, p.to-o)
		a.Tiles = 1
		if outs == t.Outs && (w.Split == nil || rows == t.Rows) {
			if w.Split != nil {
				a.Tiles = (p.to - o) / t.Outs
			}
			a.Y, a.YRow = y, p.yRow
			kernel(a)
			continue
		}
		a.Y, a.YRow = unsafe.Pointer(&p.scratch.edge), 4*t.Outs
		for r := range rows {
			inside := unsafe.Slice((*float32)(unsafe.Add(y, r*p.yRow)), outs)
			if a.More != 0 {
				copy(p.scratch.edge[r*t.Outs:], inside)
			}
		}
		kernel(a)
		for r := range rows {
			copy(unsafe.Slice((*float32)(unsafe.Add(y, r*p.yRow)), outs), p.scratch.edge[r*t.Outs:])
		}
	}
}

// mend recomputes the sums that are not finite, with the kernels for few rows.
func (p *tilePiece) mend() {
	for row := p.first + p.top; row < p.first+p.end; row++ {
		y := unsafe.Slice((*float32)(unsafe.Add(p.y, row*p.yRow+p.from*p.size)), p.to-p.from)
		if p.way.Odd(&y[0], len(y)) == 0 {
			continue
		}
		a := &p.scratch.dot
		a.x, a.rows, a.n = unsafe.Add(p.x, row*p.xRow), 1, p.in
		a.y, a.ahead, a.aheadStep = unsafe.Pointer(&p.scratch.one), fetchAhead, cpu.CacheLine
		for o, v := range y {
			if v-v == 0 {
				continue
			}
			a.w = unsafe.Add(p.w, (p.from+o)*p.wRow)
			format := p.format
			if p.blocks.kernels != nil {
				a.w, _ = p.expandRows(&p.scratch.blocks, p.linearLayer, p.from+o, 0, 1, p.in)
				format = weight.Float32
			}
			p.kernels.dot[format][1](a)
			y[o] = p.scratch.one[0]
		}
	}
}
