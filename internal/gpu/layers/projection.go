package layers

import (
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
)

// Projection is a Linear of a batch's rows with several parts, such as queries, keys and values. A Projection waits
// for Queue, so that Append may add the storing of new keys and values in the cache to the launch. A Projection
// copies its operands, and is not safe for use by several goroutines at once.
type Projection struct {
	d      *Engine
	linear Linear
	launch linearLaunch
	keep   fusedAppend
	cache  []gpu.Memory // where the launch stores, and the table of slots
}

// NewProjection makes a Projection; nil if a Linear has a single part, or is no launch of a batch's rows.
// [Engine.Linear] reports invalid operands.
func (d *Engine) NewProjection(o *Linear) *Projection {
	if len(o.Parts) < 2 || o.check() != nil || o.gates() || o.Narrow() {
		return nil
	}
	l, err := d.choose(o)
	if err != nil || l.skinny == nil && (l.gemm == nil || o.Rows > mostSkinny || d.info.Capability != groupCapability) {
		return nil
	}
	p := &Projection{d: d, linear: *o, launch: l}
	p.linear.Parts = slices.Clone(o.Parts)
	if o.Norm != nil {
		norm := *o.Norm
		p.linear.Norm = &norm
	}
	return p
}

// Append adds the storing of new keys and values in a cache, as [Plan.Append] queues it, if they are parts of the
// layer's output. The launch also loads some of the cache's pages into the L2 cache, for the attention after it.
func (p *Projection) Append(plan *attention.Plan, to attention.Pages, newK, newV gpu.Memory) bool {
	if p.cache != nil || plan.Device() != p.d.dev {
		return false
	}
	return plan.FuseAppend(to, func(a *attention.Appending) bool { return p.append(a, to[0].Data, to[1].Data, newK, newV) })
}

// append is Append for the parts that the plan exports.
func (p *Projection) append(a *attention.Appending, k, v, newK, newV gpu.Memory) bool {
	g := a.Problem
	width, o := g.KVHeads*g.Dim, &p.linear
	if k.DType != o.Parts[0].W.DType || a.Rows != o.Rows || g.Dim%4 != 0 {
		return false
	}
	keep := fusedAppend{
		slots: a.Slots, ahead: a.Ahead,
		headRows: int32(g.Pages.Planes[0].At.Head / g.Dim), dim: int32(g.Dim), pageBytes: int32(a.PageBytes),
	}
	for _, x := range [...]struct{ made, to *gpu.Memory }{{&newK, &k}, {&newV, &v}} {
		i := slices.IndexFunc(o.Parts, func(part LinearPart) bool {
			return x.made.Buffer != nil && part.Y.Address() == x.made.Address() && part.Out == width
		})
		if i < 0 || keep.cache[i] != 0 || x.made.DType != attn.Float32 || x.made.Len < o.Rows*width || p.meets(x.to) {
			return false
		}
		keep.cache[i] = x.to.Address()
	}
	p.keep, p.cache = keep, []gpu.Memory{k, v, {Buffer: a.Table}}
	return true
}

// meets reports whether the layer reads or writes some of m.
func (p *Projection) meets(m *gpu.Memory) bool {
	o, of := &p.linear, spanOf(m, m.Len)
	meets := func(x *gpu.Memory, elements int) bool {
		return x.Buffer != nil && of.meets([]span{spanOf(x, elements)})
	}
	return meets(&o.X, o.Rows*o.In) || meets(&o.Residual, o.Rows*o.Parts[0].Out) ||
		o.Norm != nil && (meets(&o.Norm.Gamma, o.In) || meets(&o.Norm.Beta, o.In)) ||
		slices.ContainsFunc(o.Parts, func(x LinearPart) bool {
			return meets(&x.W, x.Out*o.In) || meets(&x.B, x.Out) || meets(&x.Y, o.Rows*x.Out)
		})
}

// Queue queues the launch.
func (p *Projection) Queue(s *cuda.Stream) error {
	if l := p.launch.skinny; l != nil {
		return p.d.queueSkinny(s, &p.linear, *l, p.keep, p.cache...)
	}
	return p.d.queueGEMM(s, &p.linear, p.launch.gemm, p.keep, p.cache...)
}

// Upload and Close do nothing: there is no memory besides the layer's.
func (p *Projection) Upload() error { return nil }

func (p *Projection) Close() error { return nil }
