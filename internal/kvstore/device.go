package kvstore

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/queue"

	G "gorgonia.org/gorgonia"
)

// DevicePages is a Store on one GPU or several. Each member of the group has some KV heads of the pages of one context shard.
type DevicePages struct {
	GPU    *ongpu.GPU
	shards int // context shards
	config *Config
	Parts  []*devicePart // one for each member
}

// devicePart is the memory of one member.
type devicePart struct {
	share
	GPU    *ongpu.GPU
	pages  int                         // of its shard
	Layers []attn.Memory[*cuda.Buffer] // the slabs of each layer
}

// share says which keys and values a member has.
type share struct {
	heads ongpu.Heads       // of the cache's KV heads
	shard attn.ContextShard // of its pages
}

// divide returns the share of each member, and the number of context shards. Groups of members share the KV heads, in order. The members of a
// group share the pages.
func (c *Config) divide(op string) (all []share, shards int, err error) {
	n := len(c.Device.Members)
	groups, err := c.headGroups(op, n)
	if err != nil || n == 0 {
		return nil, 1, err
	}
	shards = n / groups
	copies := c.copies()
	if shards > 1 && c.Pages < shards {
		return nil, 0, errs.Errorf(op, errs.ErrUnsupported, "%d pages on %v, sharded by context: each of %d GPUs must have one", c.Pages, c.Device, shards)
	}
	for i := range n {
		heads := ongpu.HeadsOf(c.KVHeads, groups, i/shards)
		if copies > 1 {
			heads = ongpu.Heads{First: i / copies, N: 1, Copy: i % copies, Copies: copies}
		}
		all = append(all, share{heads, attn.ContextShard{Index: i % shards, Of: shards}})
	}
	return all, shards, nil
}

// copies returns the number of members that have the keys of one KV head, of a cache that is sharded by heads. Each of these members has a
// share of the query heads. Only keys that hold the values are copied: any number of query heads reads all of them.
func (c *Config) copies() int {
	if c.Device == nil || !c.Format.InKeys() || c.Shard == shardContext || c.Shard == shardAuto && c.Window == 0 {
		return 1
	}
	if n := len(c.Device.Members); n%c.KVHeads == 0 {
		return n / c.KVHeads
	}
	return 1
}

// LeastHeads returns the fewest query heads that a layer can have.
func (c *Config) LeastHeads() int { return c.KVHeads * c.copies() }

// headGroups returns the number of groups of n GPUs that share the KV heads.
func (c *Config) headGroups(op string, n int) (int, error) {
	switch {
	case n < 2:
		return 1, nil
	case c.copies() > 1:
		return n, nil
	case c.Shard == shardContext && c.Window > 0:
		return 0, errs.Errorf(op, errs.ErrUnsupported, "ShardContext, and a Window of %d keys", c.Window)
	case c.Shard == shardContext:
		return 1, nil
	case c.Shard == shardAuto && c.Window == 0:
		a, b := c.KVHeads, n
		for b > 0 {
			a, b = b, a%b
		}
		return a, nil
	case c.KVHeads < n && c.Window > 0:
		return 0, errs.Errorf(op, errs.ErrUnsupported, "%d KV heads and a Window of %d keys on %v: it is sharded by heads, and each of the %d GPUs must have one", c.KVHeads, c.Window, c.Device, n)
	case c.KVHeads < n:
		return 0, errs.Errorf(op, errs.ErrUnsupported, "ShardHeads, and %d KV heads on %v: each of the %d GPUs must have one", c.KVHeads, c.Device, n)
	}
	return n, nil
}

// NewDevice allocates pages for attention of g. The number of query heads of g is the least possible.
func NewDevice(op string, c *Config, g attn.Problem) (*DevicePages, error) {
	if c.EdgeLayers > 0 {
		return nil, errs.Errorf(op, errs.ErrUnsupported, "EdgeLayers is %d, and the cache is on %v, where all layers have one type: leave EdgeLayers out", c.EdgeLayers, c.Device)
	}
	shares, shards, err := c.divide(op)
	if err != nil {
		return nil, err
	}
	d := &DevicePages{GPU: c.Device, shards: shards, config: c}
	for i, m := range d.GPU.Members {
		d.Parts = append(d.Parts, &devicePart{share: shares[i], GPU: m, pages: shares[i].shard.Count(c.Pages)})
	}
	if err := d.Supports(op, &g); err != nil {
		return nil, err
	}
	if err := d.GPU.Enter(op); err != nil {
		return nil, err
	}
	defer d.GPU.Group.Leave()
	for i, m := range d.GPU.Members {
		part := d.Parts[i]
		if err := part.take(c); err != nil {
			err = errors.Join(err, d.Close())
			if free, e := m.Dev.Memory(); e == nil && errors.Is(err, cuda.ErrOutOfMemory) {
				asked := int64(0)
				for s := range c.Format.Slabs {
					asked += int64(c.Layers) * part.bytes(c, s)
				}
				return nil, fmt.Errorf("leanattention: %s: %d bytes asked for on %v, %d of %d free: %w", op, asked, m.Alone(), free.Free, free.Total, err)
			}
			return nil, ongpu.Error(op, err)
		}
	}
	return d, nil
}

// bytes returns the bytes of a slab that the member has.
func (p *devicePart) bytes(c *Config, s attn.Slab) int64 {
	return int64(p.pages) * int64(s.PageBytes(p.heads.N, c.PageSize))
}

// headScales returns the scales of the member's heads in a plane of a layer.
func (p *devicePart) headScales(c *Config, layer, plane int) []byte {
	all := c.headScales(layer, plane)
	return unsafe.Slice((*byte)(all.At(p.heads.First)), 4*p.heads.N)
}

// take allocates the memory.
func (p *devicePart) take(c *Config) error {
	return p.GPU.Queue.Submit(func(sub *queue.Submission) (err error) {
		p.Layers = make([]attn.Memory[*cuda.Buffer], c.Layers)
		for i := range p.Layers {
			for s := range c.Format.Slabs {
				if *p.Layers[i].At(s), err = sub.NewBuffer(p.bytes(c, s)); err != nil {
					return err
				}
			}
			for plane := range c.Format.ScaledByHead {
				scales := p.headScales(c, i, plane)
				if p.Layers[i][plane].Scales, err = sub.NewBuffer(int64(len(scales))); err == nil {
					err = p.Layers[i][plane].Scales.Upload(0, scales)
				}
				if err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func (d *DevicePages) Where() string { return d.GPU.String() }
func (d *DevicePages) Shards() int   { return d.shards }

// byContext lists the features of a cache that is sharded by context. With these features a key's position among those before the new
// tokens makes no difference.
var byContext = attn.Can{
	Name:     "a cache sharded by context",
	Features: attn.InParts | attn.Rotates | attn.RotatesBehind,
	KV:       []attn.DType{attn.Float32, attn.Float16, attn.BFloat16},
}

func (d *DevicePages) Supports(op string, g *attn.Problem) error {
	if d.shards > 1 {
		can := byContext
		if g.Pages.InKeys() {
			can.KV = append(can.KV[:len(can.KV):len(can.KV)], attn.E4M3)
		}
		if err := can.Do(op, g); err != nil {
			return errs.Errorf(op, errs.ErrUnsupported, "on %v: %v", d.GPU, err)
		}
		fresh := g.OfNew(1)
		if err := d.GPU.Supports(op, &fresh); err != nil {
			return err
		}
	}
	if g.Measures && len(d.Parts) > 1 {
		return errs.Errorf(op, errs.ErrUnsupported, "entropies or attention mass, on %v: a cache on one GPU has them", d.GPU)
	}
	if g.Variant != nil && len(d.Parts) > 1 {
		return errs.Errorf(op, errs.ErrUnsupported, "WithVariant, on %v: a cache on one GPU takes it", d.GPU)
	}
	for i, p := range d.Parts {
		part := p.problem(g)
		if part.Heads < 1 {
			return errs.Errorf(op, errs.ErrUnsupported, "%d query heads on %v: each of the %d GPUs must have one", g.Heads, d.GPU, len(d.Parts))
		}
		if err := d.GPU.Members[i].Supports(op, &part); err != nil {
			return err
		}
	}
	return nil
}

// problem returns the problem of attention to the member's keys, for the member's heads.
func (p *devicePart) problem(g *attn.Problem) attn.Problem {
	of := p.heads.Part(*g)
	if p.shard.Of > 1 {
		of = of.OfPart(g.Heads, p.shard.Index == 0)
	}
	return of
}

// Operands accepts values that are all on the cache's GPU, or all in host memory. Values in host memory are copied to the GPU, and the
// results back.
func (d *DevicePages) Operands(op string, in []G.Value) (o [4]operand.Operand, err error) {
	names := LayerNames[:]
	at, err := ongpu.SamePlace(op, names, in)
	if err != nil {
		return o, err
	}
	if at != nil && at != d.GPU {
		return o, errs.Errorf(op, errs.ErrUnsupported, "q is on %v and the cache on %s", at, ongpu.OtherName(d.GPU, at))
	}
	for i, v := range in {
		if at != nil {
			o[i] = operand.New(names[i], v.Shape(), v.Dtype())
			continue
		}
		t, err := ongpu.Dense(op, names[i], v)
		if err != nil {
			return o, err
		}
		o[i] = operand.OfTensor(names[i], t)
	}
	return o, nil
}

// CopyPages copies pages. Each member copies within its memory, and the first member copies between members.
func (d *DevicePages) CopyPages(op string, copies []Copy) error {
	if len(copies) == 0 {
		return nil
	}
	between := func(c Copy) bool { return int(c.To)%d.shards != int(c.From)%d.shards }
	err := d.eachPart(op, func(p *devicePart, s *cuda.Stream) error {
		for _, c := range copies {
			if !between(c) && p.shard.Has(c.To) {
				if err := d.copyPage(s, p, p, c); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil || !slices.ContainsFunc(copies, between) {
		return err
	}
	return d.onFirst(op, func(s *cuda.Stream) error {
		for _, c := range copies {
			for _, to := range d.Parts {
				if between(c) && to.shard.Has(c.To) {
					if err := d.copyPage(s, to, d.partOf(c.From, to.heads.First), c); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}

// copyPage queues the copy of a page, for the heads that both parts have.
func (d *DevicePages) copyPage(s *cuda.Stream, to, from *devicePart, c Copy) error {
	return d.eachBuffer(to, from, func(slab attn.Slab, dst, src *cuda.Buffer) error {
		n := int64(slab.PageBytes(to.heads.N, d.config.PageSize))
		return s.Copy(dst, int64(to.shard.Own(c.To))*n, src, int64(from.shard.Own(c.From))*n, n)
	})
}

// eachBuffer visits the buffers of two parts.
func (d *DevicePages) eachBuffer(to, from *devicePart, visit func(s attn.Slab, to, from *cuda.Buffer) error) error {
	for layer := range to.Layers {
		for s := range d.config.Format.Slabs {
			if err := visit(s, *to.Layers[layer].At(s), *from.Layers[layer].At(s)); err != nil {
				return err
			}
		}
	}
	return nil
}

// MoveSlots queues small copies in order. The queue joins several copies in one launch. With several context shards, the first member
// copies for all members, which keeps the order.
func (d *DevicePages) MoveSlots(op string, moves []Move) error {
	if d.shards == 1 {
		return d.eachPart(op, func(p *devicePart, s *cuda.Stream) error {
			for _, m := range moves {
				if err := d.moveSlot(s, p, p, m); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return d.onFirst(op, func(s *cuda.Stream) error {
		for _, m := range moves {
			for _, to := range d.Parts {
				if to.shard.Has(m.To.Page) {
					if err := d.moveSlot(s, to, d.partOf(m.From.Page, to.heads.First), m); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}

// moveSlot queues the move of a token, for the heads that both parts have.
func (d *DevicePages) moveSlot(s *cuda.Stream, to, from *devicePart, m Move) error {
	m.To.Page, m.From.Page = to.shard.Own(m.To.Page), from.shard.Own(m.From.Page)
	return d.eachBuffer(to, from, func(slab attn.Slab, dst, src *cuda.Buffer) error {
		for head := range to.heads.N {
			to, from, n := m.bytes(slab, head, to.heads.N, d.config.PageSize)
			if err := s.Copy(dst, int64(to), src, int64(from), int64(n)); err != nil {
				return err
			}
		}
		return nil
	})
}

// eachPart queues work on each member.
func (d *DevicePages) eachPart(op string, work func(*devicePart, *cuda.Stream) error) error {
	return d.submit(op, func(sub *queue.Submission) error {
		return sub.Each(func(i int, sub *queue.Submission) error {
			return sub.Do(func(s *cuda.Stream) error { return work(d.Parts[i], s) })
		})
	})
}

// onFirst queues work on the first member, which can access the memory of all members.
func (d *DevicePages) onFirst(op string, work func(*cuda.Stream) error) error {
	return d.submit(op, func(sub *queue.Submission) error { return sub.Do(work) })
}

func (d *DevicePages) submit(op string, f func(*queue.Submission) error) error {
	if err := d.GPU.Enter(op); err != nil {
		return err
	}
	defer d.GPU.Group.Leave()
	if d.GPU.Group.Recording() { // replays would copy again
		return ongpu.WithinRecord(op, d.GPU)
	}
	if err := d.GPU.Queue.Submit(f); err != nil {
		return ongpu.Error(op, err)
	}
	return nil
}

func (d *DevicePages) Transfer(op string, t *Transfer, in bool) error {
	if err := d.GPU.Enter(op); err != nil {
		return err
	}
	defer d.GPU.Group.Leave()
	if err := d.transferNow(t, in); err != nil {
		return ongpu.Error(op, err)
	}
	return nil
}

// transferNow is Transfer after the GPU was entered. It copies through pinned memory. The queue may delay small copies to the GPU until a
// wait, so transferNow waits, and returns the error of a copy.
func (d *DevicePages) transferNow(t *Transfer, in bool) error {
	q := d.GPU.Queue
	p, err := q.TakePinned(len(t.Memory))
	if err != nil {
		return err
	}
	defer q.GivePinned(p)
	if in {
		copy(p.Bytes, t.Memory)
	}
	err = q.Submit(func(sub *queue.Submission) error {
		err := d.eachSpan(t, in, func(b *cuda.Buffer, at, from, n int) error {
			if in {
				return sub.Upload(b, int64(at), p, from, n)
			}
			return sub.Download(p, from, b, int64(at), n)
		})
		if err != nil {
			return err
		}
		return sub.Mark(p)
	})
	if err == nil {
		err = q.Wait(p)
	}
	if err == nil && !in {
		copy(t.Memory, p.Bytes)
	}
	return err
}

// eachSpan visits the spans of a transfer: n bytes at offset at of a member's memory, and their offset from in the caller's memory. One span
// of the transfer may be in the memory of several members. With in, eachSpan visits all copies of a span, and otherwise one copy.
func (d *DevicePages) eachSpan(t *Transfer, in bool, visit func(b *cuda.Buffer, at, from, n int) error) error {
	of := func(p *devicePart) *cuda.Buffer { return *p.Layers[t.Layer].At(t.Slab) }
	from := 0
	if len(d.Parts) == 1 {
		for _, s := range t.Spans {
			if err := visit(of(d.Parts[0]), s.At, from, s.N); err != nil {
				return err
			}
			from += s.N
		}
		return nil
	}
	slab := t.Slab.PageBytes(1, d.config.PageSize) // bytes of a head in a page
	for _, s := range t.Spans {
		for end := s.At + s.N; s.At < end; {
			page, head, rest := s.At/slab/d.config.KVHeads, s.At/slab%d.config.KVHeads, s.At%slab
			p := d.partOf(int32(page), head)
			there := min(end, (page*d.config.KVHeads+p.heads.First+p.heads.N)*slab) - s.At // to the end of the member's last head
			own := int(p.shard.Own(int32(page)))
			for _, part := range d.Parts {
				if part != p && !(in && part.heads.Copies > 1 && part.heads.First == p.heads.First) {
					continue
				}
				if err := visit(of(part), (own*p.heads.N+head-p.heads.First)*slab+rest, from, there); err != nil {
					return err
				}
			}
			s.At, from = s.At+there, from+there
		}
	}
	return nil
}

// partOf returns the part of the member that has a KV head of a page.
func (d *DevicePages) partOf(page int32, head int) *devicePart {
	i := slices.IndexFunc(d.Parts, func(p *devicePart) bool { return p.shard.Has(page) && head < p.heads.First+p.heads.N })
	return d.Parts[i]
}

// Close frees the memory, after queued work. A closed GPU has freed the memory already.
func (d *DevicePages) Close() (first error) {
	for _, p := range d.Parts {
		for i := range p.Layers {
			for _, plane := range p.Layers[i] {
				for _, b := range [...]*cuda.Buffer{plane.Data, plane.Scales} {
					if b == nil { // there is none, or the allocation failed
						continue
					}
					if err := b.Close(); err != nil && first == nil && !errors.Is(err, cuda.ErrClosed) {
						first = err
					}
				}
			}
		}
	}
	d.Parts = nil
	return first
}
