package gpu

import (
	"errors"
	"slices"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cuda"
)

// Constants of the kernels (kernels/batch_chain.cuh).
const (
	batchLayers     = 4
	mostChainedRing = 14 // stages
)

// BatchChain is linear layers of the rows of a batch, one behind the other, in
// launches of up to four: what [Chain] is for fewer rows. Linear says whether it has
// taken a layer, which then waits for Queue. A chain keeps what it was given, as it was
// when it was taken. Not for several goroutines at once.
//
// It has not run on a GPU yet, only on an emulated one, and no node uses it before it
// has been measured.
type BatchChain struct {
	d       *Decoder
	element int // of weights
	kind    int // an index of batchRows
	rows    int
	layers  []chainedLinear
	made    map[uint64]madeIn // by address
	claims                    // reads: of memory that no layer makes
	words   *cuda.Buffer      // of each launch: the number of the run, and counters

	// Of the last layer, behind which there will be none then.
	keep   batchKeep
	append func(*cuda.Stream) error // queues the storing as a launch of its own; nil: there is nothing to keep
}

// chainedLinear is a layer, and which layers make its x and what it adds; -1: none does.
type chainedLinear struct {
	Linear
	x, residual madeIn
}

// madeIn is a part of a layer.
type madeIn struct{ layer, part int }

var notMade = madeIn{-1, 0}

// batchChainParams is struct BatchChainParams.
type batchChainParams struct {
	layers      [batchLayers]batchParams
	ready, need [batchLayers]uint64
	run         uint64
	keep        batchKeep
	count, end  int32
	affine      int32
	_           [4]byte
}

// batchKeep is struct BatchKeep.
type batchKeep struct {
	cache         [mostParts]uint64
	slots         uint64
	headRows, dim int32
}

// NewBatchChain makes an empty chain; nil where the GPU has no kernels for one.
func (d *Decoder) NewBatchChain() *BatchChain {
	if !slices.ContainsFunc(d.batches[:], func(b *batches) bool { return b != nil }) {
		return nil
	}
	return &BatchChain{d: d, element: -1, made: make(map[uint64]madeIn)}
}

// source says what makes memory that a layer reads. ok is false for what is partly
// made here.
func (c *BatchChain) source(m *Memory, elements int) (by madeIn, ok bool) {
	if m.Buffer == nil {
		return notMade, true
	}
	if by, is := c.made[m.address()]; is {
		return by, elements == c.rows*c.layers[by.layer].Parts[by.part].Out
	}
	return notMade, !spanOf(m, elements).meets(c.writes)
}

// Linear takes a layer if the chain can do it behind those that it has. What is
// wrong with its operands is left to [Decoder.Linear].
func (c *BatchChain) Linear(o *Linear) bool {
	if o.check() != nil {
		return false
	}
	element := elementOf(o.Parts[0].W.DType)
	l, ok, err := c.d.configureBatch(o)
	if !ok || err != nil || c.append != nil || c.rows > 0 && (c.rows != o.Rows || c.element != element) {
		return false
	}
	own := chainedLinear{Linear: *o}
	own.Parts = slices.Clone(o.Parts)
	if o.Norm != nil {
		norm := *o.Norm
		own.Norm = &norm
	}
	var okX, okResidual bool
	own.x, okX = c.source(&o.X, o.Rows*o.In)
	own.residual, okResidual = c.source(&o.Residual, o.Rows*o.Parts[0].Out)
	if !okX || !okResidual {
		return false
	}
	// The thread that has made an element adds it: in both layers the tiles are the same.
	if by := own.residual; by != notMade && len(c.layers[by.layer].Parts) > 1 {
		return false
	}
	var reads, writes []span
	read := func(m *Memory, elements int) {
		if m.Buffer != nil {
			reads = append(reads, spanOf(m, elements))
		}
	}
	if own.x == notMade {
		read(&o.X, o.Rows*o.In)
	}
	if own.residual == notMade {
		read(&o.Residual, o.Rows*o.Parts[0].Out)
	}
	holds := []Memory{o.X, o.Residual}
	if o.Norm != nil {
		read(&o.Norm.Gamma, o.In)
		read(&o.Norm.Beta, o.In)
		holds = append(holds, o.Norm.Gamma, o.Norm.Beta)
	}
	for i := range o.Parts {
		p := &o.Parts[i]
		read(&p.W, p.Out*o.In)
		read(&p.B, p.Out)
		writes = append(writes, spanOf(&p.Y, o.Rows*p.Out))
		holds = append(holds, p.W, p.B, p.Y)
	}
	if !c.apart(reads, writes) {
		return false
	}
	c.element, c.rows, c.kind = element, o.Rows, l.kind
	for i := range o.Parts {
		c.made[o.Parts[i].Y.address()] = madeIn{len(c.layers), i}
	}
	c.layers = append(c.layers, own)
	c.claim(reads, writes, holds...)
	return true
}

// Append takes the storing of new keys and values in a cache, as [Plan.Append] queues
// it, if they are parts of what the last layer makes.
func (c *BatchChain) Append(p *Plan, k, v, newK, newV Memory) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ready("chain") != nil || p.look.idle || !p.appends || c.append != nil || newK.Buffer == nil || newV.Buffer == nil || p.checkPages("chain", &k, &v) != nil {
		return false
	}
	g := &p.look.geometry
	width := g.KVHeads * g.Dim
	if elementOf(k.DType) != c.element || p.look.rows != c.rows || g.Dim%4 != 0 || p.engine.dev != c.d.dev {
		return false
	}
	keep := batchKeep{slots: p.memory.table.Address() + uint64(p.memory.sections.slots), headRows: int32(g.Key.Head / g.Dim), dim: int32(g.Dim)}
	for _, x := range []struct{ made, to *Memory }{{&newK, &k}, {&newV, &v}} {
		by, is := c.made[x.made.address()]
		if !is || by.layer != len(c.layers)-1 || c.layers[by.layer].Parts[by.part].Out != width || x.made.DType != cpu.Float32 || x.made.Len < c.rows*width {
			return false
		}
		keep.cache[by.part] = x.to.address()
	}
	writes := []span{spanOf(&k, k.Len), spanOf(&v, v.Len)}
	if !c.apart(nil, writes) {
		return false
	}
	c.append = func(s *cuda.Stream) error { return p.Append(s, k, v, newK, newV) }
	c.keep = keep
	c.claim(nil, writes, k, v, Memory{Buffer: p.memory.table})
	p.appended, p.anyAppend = [2]Memory{k, v}, true
	return true
}

// batchRun is layers of one launch: from the first on to before the last.
type batchRun struct {
	first, last     int
	split, clusters int
	shared, end     int
	affine          int
	stages          [batchLayers]int
	words           int // up to where its words begin
	count           int // of words; 0: a layer that is launched by itself
}

// configure says how layers are launched together; ok is false if they can't be.
func (c *BatchChain) configure(first, last int) (best batchRun, ok bool, err error) {
	rows := batchRows[c.kind]
	least := 0.0
	for split := 2; split <= mostSplit; split *= 2 {
		r := batchRun{first: first, last: last, split: split}
		for _, l := range c.layers[first:last] {
			if l.Norm != nil {
				r.affine = max(r.affine, ceil(ceil(l.In, batchBlock), split)*batchBlock)
			}
		}
		const partials = 2 * 2 * batchTile // floats a row: of all blocks, and the block's own, in two places
		rest := 4*(partials*rows+2*2*mostSplit*rows+2*r.affine+rows) + 8*(2*mostChainedRing+batchOthers+1)
		r.end = (c.d.info.SharedPerBlockMost - rest) / 1024 * 1024
		r.shared = r.end + rest
		fits := true
		for i, l := range c.layers[first:last] {
			blocks := ceil(ceil(l.In, batchBlock), split)
			r.stages[i] = min((r.end-blocks*rows*batchX)/batchStage, mostChainedRing)
			fits = fits && r.stages[i] >= batchRings[len(batchRings)-1].stages
		}
		if !fits {
			continue
		}
		f := c.d.batches[c.element].chained[c.kind]
		n, err := c.d.clustersAtOnce(clusterKey{c.element, -2 - len(batchRows) - c.kind, split, r.shared}, f, clusterGrid(1, split, batchThreads, r.shared, true))
		if err != nil {
			return best, false, err
		}
		if r.clusters = n; n == 0 {
			continue
		}
		cost := 0.0
		for _, l := range c.layers[first:last] {
			blocks := ceil(ceil(l.In, batchBlock), split)
			cost += float64(ceil(l.tilesOf(batchTile), n)*max(blocks, batchMeeting)) + float64(blocks*rows/8)*batchOperands
		}
		if !ok || cost < least {
			best, least, ok = r, cost, true
		}
	}
	return best, ok, nil
}

// runs shares the layers out to launches, which need so many words; ok is false if some
// layers can't be launched so.
func (c *BatchChain) runs() (all []batchRun, words int, ok bool, err error) {
	for first, last := 0, 0; first < len(c.layers); first = last {
		last = first + 1
		for last < min(first+batchLayers, len(c.layers)) && c.follows(last) {
			last++
		}
		if last-first == 1 { // its own launch is as good
			all = append(all, batchRun{first: first, last: last})
			continue
		}
		r, ok, err := c.configure(first, last)
		if !ok || err != nil {
			return nil, 0, false, err
		}
		r.words, r.count = words, runBytes/4
		for _, l := range c.layers[r.first:r.last] {
			r.count += l.tilesOf(batchTile)
		}
		r.count = ceil(r.count, runBytes/4) * (runBytes / 4)
		words += r.count
		all = append(all, r)
	}
	return all, words, true, nil
}

// follows says whether a layer may be in the same launch as the one before: it reads
// what that one makes, and not both have a norm.
func (c *BatchChain) follows(i int) bool {
	return c.layers[i].x.layer == i-1 && (c.layers[i].Norm == nil || c.layers[i-1].Norm == nil)
}

// Queue queues the chain. The launches use memory that Upload fills: they may be
// captured, and must not run before.
func (c *BatchChain) Queue(s *cuda.Stream) error {
	runs, words, ok, err := c.runs()
	if err != nil {
		return err
	}
	if !ok {
		runs = runs[:0]
		for i := range c.layers {
			runs = append(runs, batchRun{first: i, last: i + 1})
		}
	}
	if words > 0 {
		if err := c.d.dev.Relaxed(func() (err error) {
			c.words, err = c.d.dev.NewBuffer(int64(4 * words))
			return err
		}); err != nil {
			return err
		}
	}
	kept := c.append == nil
	for i := range runs {
		r := &runs[i]
		if r.count == 0 {
			err = c.d.Linear(s, &c.layers[r.first].Linear)
		} else {
			err = c.launch(s, r)
			kept = kept || r.last == len(c.layers)
		}
		if err != nil {
			return err
		}
	}
	if kept {
		return nil
	}
	return c.append(s)
}

func (c *BatchChain) launch(s *cuda.Stream, r *batchRun) error {
	d := c.d
	d.mu.Lock()
	defer d.mu.Unlock()
	run := c.words.Address() + uint64(4*r.words)
	p := batchChainParams{run: run, count: int32(r.last - r.first), end: int32(r.end), affine: int32(r.affine)}
	counters := run + runBytes
	for i := range r.last - r.first {
		l, q := &c.layers[r.first+i], &p.layers[i]
		q.linearParams = linearParams{x: l.X.address(), rows: int32(l.Rows), split: int32(r.split), stages: int32(r.stages[i])}
		var err error
		if q.x, err = d.tensorMap(&l.X, l.In, l.Rows, batchRows[c.kind]); err != nil {
			return err
		}
		if err := d.linearArgs(&q.linearParams, &l.Linear, l.Norm, 0, batchTile); err != nil {
			return err
		}
		if by := l.x; by.layer >= r.first {
			j := by.layer - r.first
			if p.ready[j] == 0 {
				p.ready[j] = counters
				counters += uint64(4 * p.layers[j].tiles[mostParts-1])
			}
			p.need[i] = p.ready[j]
			if by.part > 0 {
				p.need[i] += uint64(4 * p.layers[j].tiles[by.part-1])
			}
		}
	}
	if r.last == len(c.layers) {
		p.keep = c.keep
	}
	d.args.Reset()
	cuda.Struct(&d.args, &p)
	for _, b := range c.holds {
		d.args.Hold(b)
	}
	d.args.Hold(c.words)
	g := clusterGrid(r.clusters, r.split, batchThreads, r.shared, true)
	g.Cooperative = true
	return d.batches[c.element].chained[c.kind].Launch(s, g, &d.args)
}

// Upload fills the memory that the launches use. It is not for a capture.
func (c *BatchChain) Upload() error {
	if c.words == nil {
		return nil
	}
	return c.words.Set(0, 0, c.words.Len())
}

// Close gives the memory of the launches back.
func (c *BatchChain) Close() error {
	if c.words == nil {
		return nil
	}
	words := c.words
	c.words, c.layers, c.holds, c.append = nil, nil, nil, nil
	if err := words.Close(); err != nil && !errors.Is(err, cuda.ErrClosed) { // with its GPU
		return err
	}
	return nil
}
