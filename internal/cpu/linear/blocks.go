package linear

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/weight"
)

// Weights of at most 8 bits. A thread unpacks the groups of some rows of weights into its first-level cache. Then the thread
//
//   - converts the groups to float32, for the kernels of float32 weights. Results have the bits of float32 weights. E4M3 is always
//     converted, without groups;
//   - or, if x may be rounded, multiplies integers: x is rounded to 8 bits by block, once. The bits of a row depend neither on the other
//     rows nor on their number. For several rows of x, the groups of some rows of weights are interleaved (a panel).

const (
	blockOuts   = 32       // the most output features that a thread unpacks at a time
	unpackBytes = 16 << 10 // the most bytes of their groups, but for dotStreams features
	fetchBlocks = 16 << 10 // the prefetch distance in bytes, beyond what is being read

	panelGroups = 6 // the most groups of a row in a panel, which stays in the first-level cache: an even number
)

// isBlocks reports whether weights of f are read in groups.
func isBlocks(f weight.Format) bool { return f == weight.Int8 || f == weight.E4M3 || f.Block() > 1 }

// blockRun is the part of a linearRun for weights of 8 and fewer bits.
type blockRun struct {
	kernels *blockKernels // nil: weights of another format
	kind    blockKind
	integer bool // x is rounded
	groups  int  // of a row
	strips  bool // the block's rows are multiplied in strips
	x       cpu.Aligned
	rounds  []roundScratch
}

// roundScratch is the scratch of a thread that rounds x.
type roundScratch struct {
	roundArgs
	whole cpu.Aligned // a row of x with zeros behind its end
	strip cpu.Aligned // stripRows rounded rows
	order interleaveArgs
	_     [cpu.CacheLine]byte
}

// blockScratch is the scratch of a thread.
type blockScratch struct {
	groups, floats cpu.Aligned
	partial        cpu.Aligned // partialBytes of each pass, or panelPartial of each row
	unpack         unpackArgs
	expand         expandArgs
	mul            groupArgs
	panel          cpu.Aligned
	interleave     interleaveArgs
	panelMul       panelArgs
	products, edge cpu.Aligned // of strips
	stripMul       stripArgs
	row            blockRowArgs
	dot            dotArgs
}

// forget drops the pointers to operands.
func (s *blockScratch) forget() {
	s.unpack, s.expand, s.mul, s.row, s.dot = unpackArgs{}, expandArgs{}, groupArgs{}, blockRowArgs{}, dotArgs{}
	s.interleave, s.panelMul, s.stripMul = interleaveArgs{}, panelArgs{}, stripArgs{}
}

// setBlocks prepares the run for its format.
func (l *linearRun) setBlocks() {
	b := &l.blocks
	if b.kernels, b.integer = nil, false; isBlocks(l.format) {
		b.kernels, b.kind, b.integer, b.groups = l.kernels.blocks, kindOf(l.format), l.roundX && l.format != weight.E4M3, (l.in-1)/groupElements+1
	}
}

func (b *blockRun) xRow() int { return b.groups * int(unsafe.Sizeof(xGroup{})) }
func (b *blockRun) wRow() int { return b.groups * int(unsafe.Sizeof(weightGroup{})) }

// roundRun is a linearRun as a task that rounds rows of x.
type roundRun linearRun

// roundRows rounds the block's rows of x, of each x that layers have.
func (l *linearRun) roundRows(e *cpu.Engine, threads int) error {
	b := &l.blocks
	xs := 0
	for i := range l.layers {
		layer := &l.layers[i]
		layer.rounded = -1
		for _, other := range l.layers[:i] {
			if other.x == layer.x && other.xRow == layer.xRow {
				layer.rounded = other.rounded
			}
		}
		if layer.rounded < 0 {
			layer.rounded, xs = xs, xs+1
		}
	}
	tasks := min(l.rows, threads)
	if b.strips {
		tasks = min(l.stripCount(), threads)
		b.x.Grow(xs * l.stripCount() * b.xStep())
	} else {
		b.x.Grow(xs * l.rows * b.xRow())
	}
	if l.rows*l.in < roundShare {
		tasks = 1
	}
	l.shares = tasks
	for len(b.rounds) < tasks {
		b.rounds = append(b.rounds, roundScratch{})
	}
	if tasks > 1 {
		return e.RunOn((*roundRun)(l), tasks, tasks)
	}
	(*roundRun)(l).Work(0, 0)
	return nil
}

// roundShare is the least number of elements of x that several threads round.
const roundShare = 1 << 14

// Work rounds a share of the rows.
func (r *roundRun) Work(i, _ int) {
	l := (*linearRun)(r)
	s := &l.blocks.rounds[i]
	next, a := 0, &s.roundArgs
	for j := range l.layers {
		layer := &l.layers[j]
		if layer.rounded < next {
			continue
		}
		next++
		if l.blocks.strips {
			l.roundStrips(s, layer, i)
			continue
		}
		for k := i * l.rows / l.shares; k < (i+1)*l.rows/l.shares; k++ {
			l.roundRow(s, unsafe.Add(l.blocks.x.At, (layer.rounded*l.rows+k)*l.blocks.xRow()), layer, k)
		}
	}
	*a = roundArgs{}
}

// roundRow rounds a row of the block.
func (l *linearRun) roundRow(s *roundScratch, dst unsafe.Pointer, layer *linearLayer, k int) {
	whole, a := (l.in+31)/32*32, &s.roundArgs
	a.dst, a.src, a.n = dst, unsafe.Add(layer.x, (l.first+k)*layer.xRow), whole
	if l.in < whole {
		s.whole.Grow(whole * l.size)
		x := unsafe.Slice((*float32)(s.whole.At), whole)
		clear(x[copy(x, unsafe.Slice((*float32)(a.src), l.in)):])
		a.src = s.whole.At
	}
	l.blocks.kernels.round(a)
}

// unpackRows makes groups of n elements of rows of weights at src. The bytes from ahead bytes on are prefetched.
func (l *linearRun) unpackRows(s *blockScratch, src unsafe.Pointer, rows, n, ahead int) {
	row := ((n-1)/groupElements + 1) * int(unsafe.Sizeof(weightGroup{}))
	s.groups.Grow(rows * row)
	s.unpack = unpackArgs{dst: s.groups.At, dstRow: row, src: src, srcRow: l.wRow, rows: rows, n: n}
	s.unpack.fetch, s.unpack.fetchStep = uintptr(src)+uintptr(ahead), l.format.Size(groupElements)
	l.blocks.kernels.unpack[l.format](&s.unpack)
}

// expandRows converts n elements of rows of weights to float32: from output feature o and element k on. It returns the bytes between two
// rows of the result.
func (l *linearRun) expandRows(s *blockScratch, layer *linearLayer, o, k, rows, n int) (at unsafe.Pointer, row int) {
	src, groups := unsafe.Add(layer.w, o*l.wRow+l.format.Size(k)), (n-1)/groupElements+1
	row = 4 * groups * groupElements
	s.floats.Grow(rows * row)
	if l.format == weight.E4M3 {
		for r := range rows {
			l.widenRow(unsafe.Slice((*float32)(unsafe.Add(s.floats.At, r*row)), n), layer, unsafe.Add(src, r*l.wRow), o+r, k)
		}
		return s.floats.At, row
	}
	l.unpackRows(s, src, rows, n, rows*l.wRow+fetchBlocks)
	s.expand = expandArgs{dst: s.floats.At, dstRow: row, src: s.groups.At, srcRow: s.unpack.dstRow, rows: rows, groups: groups}
	l.blocks.kernels.expand[l.blocks.kind](&s.expand)
	return s.floats.At, row
}

// widenRow converts elements of E4M3 at src, those of output feature o from element k on, and multiplies them by their scales.
func (l *linearRun) widenRow(dst []float32, layer *linearLayer, src unsafe.Pointer, o, k int) {
	if l.group == 0 {
		vector.WidenRows(dst, attn.E4M3, src, (*float32)(unsafe.Add(layer.scales, 4*o)), len(dst), 0)
		return
	}
	scales := unsafe.Add(layer.scales, 4*o*((l.in-1)/l.group+1))
	for at := 0; at < len(dst); { // no pointer leaves the weight, not even behind its last element
		// Whole groups together, or the rest of one.
		n, all := min(l.group-(k+at)%l.group, len(dst)-at), 1
		if n == l.group {
			all = (len(dst) - at) / n
		}
		vector.WidenRows(dst[at:at+all*n], attn.E4M3, unsafe.Add(src, at), (*float32)(unsafe.Add(scales, 4*((k+at)/l.group))), n, 1)
		at += all * n
	}
}

// blockFeatures computes the sums of output features [from, to) of a layer for the block's rows.
func (l *linearRun) blockFeatures(s *blockScratch, layer *linearLayer, from, to int) {
	if l.blocks.strips {
		l.stripFeatures(s, layer, from, to)
		return
	}
	row := l.blocks.kernels.row[l.format]
	switch k := l.blocks.kernels; {
	case l.format == weight.E4M3 && l.rows < len(k.e4m3):
		row = k.e4m3[l.rows]
	case !l.blocks.integer || l.rows > 1:
		row = nil
	}
	if row != nil {
		l.rowFeatures(&s.row, row, layer, from, to)
		return
	}
	if !l.blocks.integer {
		for at := from; at < to; at += dotStreams {
			l.exactFeatures(s, layer, at, min(dotStreams, to-at))
		}
		return
	}
	for k := l.blocks.kernels; k.panelRows > 0 && l.rows >= k.panelRows && to-from >= panelOuts; from += panelOuts {
		l.panelFeatures(s, layer, from)
	}
	// The groups of so many features fit the first-level cache.
	most := min(max(unpackBytes/(dotStreams*l.blocks.wRow()), 1), blockOuts/dotStreams) * dotStreams
	for at := from; at < to; at += most {
		n := min(most, to-at)
		l.unpackRows(s, unsafe.Add(layer.w, at*l.wRow), n, l.in, n*l.wRow+fetchBlocks)
		l.multiplyGroups(s, layer, unsafe.Add(layer.y, l.first*layer.yRow+at*l.size), n)
	}
}

// panelFeatures computes the sums of panelOuts output features from o on.
func (l *linearRun) panelFeatures(s *blockScratch, layer *linearLayer, o int) {
	b, p := &l.blocks, &s.panelMul
	size := int(unsafe.Sizeof(panelGroup{}))
	s.panel.Grow(panelGroups * size)
	s.partial.Grow(l.rows * panelPartial)
	*p = panelArgs{y: unsafe.Add(layer.y, l.first*layer.yRow+o*l.size), yRow: layer.yRow, w: s.panel.At, xRow: b.xRow(), rows: l.rows, partial: s.partial.At, unfinished: 1}
	x := unsafe.Add(b.x.At, layer.rounded*l.rows*b.xRow())
	for g := 0; g < b.groups; g += panelGroups {
		groups, k := min(panelGroups, b.groups-g), g*groupElements
		n, src := min(groups*groupElements, l.in-k), unsafe.Add(layer.w, o*l.wRow+l.format.Size(k))
		for set := 0; set < panelOuts; set += dotStreams {
			l.packSet(s, unsafe.Add(s.panel.At, set*size/panelOuts), unsafe.Add(src, set*l.wRow), n)
		}
		// A part of the panel prefetches a part of the next.
		p.fetch = uintptr(layer.w) + uintptr((o+panelOuts)*l.wRow+panelOuts*l.format.Size(k))
		p.groups, p.half = groups, 0
		if rest := n % groupElements; rest > 0 && rest <= groupElements/2 {
			p.groups, p.half = groups-1, 1
		}
		p.lines = panelOuts*l.format.Size(n)/(cpu.CacheLine*max(p.groups, 1)*((l.rows+1)/2)) + 1
		p.more = g
		if p.x = unsafe.Add(x, g*int(unsafe.Sizeof(xGroup{}))); g+groups == b.groups {
			p.unfinished = 0
		}
		b.kernels.panel[b.kind](p)
	}
}

// packSet makes a set of a panel of n elements of rows of weights at src.
func (l *linearRun) packSet(s *blockScratch, dst, src unsafe.Pointer, n int) {
	b, a := &l.blocks, &s.interleave
	if pack := b.kernels.pack[l.format]; pack != nil {
		s.unpack = unpackArgs{dst: dst, src: src, srcRow: l.wRow, n: n}
		pack(&s.unpack)
		return
	}
	l.unpackRows(s, src, dotStreams, n, 0)
	*a = interleaveArgs{dst: dst, src: s.groups.At, srcRow: s.unpack.dstRow, second: secondOf[b.kind], groups: (n-1)/groupElements + 1}
	b.kernels.interleave(a)
}

// secondOf is the offset in a weightGroup, by kind, of the numbers that a panelGroup has as second.
var secondOf = [blockKinds]int{int(unsafe.Offsetof(weightGroup{}.minima)), int(unsafe.Offsetof(weightGroup{}.minima)), int(unsafe.Offsetof(weightGroup{}.high))}

// rowFeatures computes the sums of output features [from, to) of a layer for one row or, of E4M3, for the few rows that the kernel is for.
func (l *linearRun) rowFeatures(a *blockRowArgs, row func(*blockRowArgs), layer *linearLayer, from, to int) {
	of := blockRowArgs{yStep: l.size, wRow: l.wRow, n: l.in, fetchStep: dotStreams * l.wRow / l.blocks.groups}
	if l.format == weight.E4M3 {
		of.rows, of.x, of.xRow, of.yRow = l.rows, unsafe.Add(layer.x, l.first*layer.xRow), layer.xRow, layer.yRow
		if of.group, of.scaleRow = l.blocks.groups*groupElements, 4; l.group > 0 {
			of.group, of.scaleRow = l.group, 4*((l.in-1)/l.group+1)
		}
	} else {
		of.x = unsafe.Add(l.blocks.x.At, layer.rounded*l.blocks.xRow())
	}
	scaleRow := of.scaleRow
	for o := from; o < to; o += max(1, of.sets*dotStreams) {
		if of.sets = (to - o) / dotStreams; of.sets == 0 { // all output features are the same
			of.yStep, of.wRow, of.scaleRow = 0, 0, 0
		}
		*a = of
		a.sets = max(1, of.sets)
		a.w, a.y = unsafe.Add(layer.w, o*l.wRow), unsafe.Add(layer.y, l.first*layer.yRow+o*l.size)
		a.fetch = uintptr(a.w) + fetchBlocks
		if scaleRow > 0 {
			a.scales = unsafe.Add(layer.scales, o*scaleRow)
		}
		row(a)
	}
}

// exactFeatures computes the sums of n output features, at most dotStreams, with the kernels of float32 weights. It converts as many
// elements of a row at a time as stay in the first-level cache.
func (l *linearRun) exactFeatures(s *blockScratch, layer *linearLayer, from, n int) {
	y, step := unsafe.Add(layer.y, l.first*layer.yRow+from*l.size), dotStreams
	a := &s.dot
	*a = dotArgs{yStep: l.size, yRow: layer.yRow, xRow: layer.xRow}
	if n < dotStreams { // all streams take the same row
		a.yStep, step = 0, 1
	}
	s.partial.Grow(dotStreams * l.passes * partialBytes)
	for k := 0; k < l.in; k += passSteps {
		a.n, a.more, a.unfinished = min(passSteps, l.in-k), min(k, 1), 0
		if k+a.n < l.in {
			a.unfinished = 1
		}
		w, row := l.expandRows(s, layer, from, k, n, a.n)
		if n == dotStreams {
			a.wStep = row
		}
		for o := 0; o < n; o += step {
			a.w = unsafe.Add(w, o*row)
			for pass, begin := 0, 0; pass < l.passes; pass++ {
				end := (pass + 1) * l.rows / l.passes
				a.rows = end - begin
				a.x, a.y = unsafe.Add(layer.x, (l.first+begin)*layer.xRow+k*l.size), unsafe.Add(y, begin*layer.yRow+o*l.size)
				a.partial = unsafe.Add(s.partial.At, (o*l.passes+pass)*partialBytes)
				l.kernels.dot[weight.Float32][a.rows](a)
				begin = end
			}
		}
	}
}

// multiplyGroups multiplies the rounded rows of x by n unpacked rows of weights.
func (l *linearRun) multiplyGroups(s *blockScratch, layer *linearLayer, y unsafe.Pointer, n int) {
	b, k, a := &l.blocks, l.blocks.kernels, &s.mul
	*a = groupArgs{yRow: layer.yRow, xRow: b.xRow(), groups: b.groups, sets: 1}
	x := unsafe.Add(b.x.At, layer.rounded*l.rows*a.xRow)
	at := func(row, o int) {
		a.x, a.w, a.y = unsafe.Add(x, row*a.xRow), unsafe.Add(s.groups.At, o*b.wRow()), unsafe.Add(y, row*a.yRow+o*l.size)
	}
	rows, outs := 0, 0 // of many
	if k.rows > 0 && l.rows >= k.rows {
		rows, outs = l.rows/k.rows*k.rows, n/k.outs*k.outs
	}
	a.yStep, a.wRow = l.size, b.wRow()
	for row := 0; row < rows; row += k.rows {
		for o := 0; o < outs; o += k.outs {
			at(row, o)
			k.many[b.kind](a)
		}
	}
	for row := range l.rows {
		a.yStep, a.wRow = l.size, b.wRow()
		from, step := outs, 0
		if row >= rows {
			from = 0
		}
		for o := from; o < n; o += step {
			if a.sets = (n - o) / dotStreams; a.sets > 0 {
				step = a.sets * dotStreams
			} else { // all output features are the same
				a.sets, a.yStep, a.wRow, step = 1, 0, 0, 1
			}
			at(row, o)
			k.one[b.kind](a)
		}
	}
}
