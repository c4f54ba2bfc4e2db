package leanattention

import (
	"errors"
	"fmt"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/queue"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// attendDevice is [Attend] on tensors of a GPU; v are q, k, v, out and, if
// wanted, the log-sum-exp.
func attendDevice(op string, gpu *ongpu.GPU, v []G.Value, a *Args, c *config) error {
	names := [...]string{"q", "k", "v", "out", "lse"}
	var t [5]*ongpu.Tensor
	var o [3]operand.Operand
	for i := range v {
		t[i] = ongpu.Must(v[i])
		if i < 3 {
			o[i] = t[i].Operand(names[i])
		}
	}
	p, err := newDeviceProblem(op, o[0], o[1], o[2])
	if err != nil {
		return err
	}
	if err := c.checkHeads(op, p.heads); err != nil {
		return err
	}
	further, err := p.furtherThere(op, gpu, a.Bias, a.Sinks, c)
	if err != nil {
		return err
	}
	if further.tensors, err = c.tensorsThere(op, gpu, a, p.query); err != nil {
		return err
	}
	beside, err := besideThere(op, &p, a, c, append(t[:len(v):len(v)], further.all()...))
	if err != nil {
		return err
	}
	c.measures = beside.entropy != nil || beside.mass != nil
	if beside.mass != nil {
		if err := c.massFits(op, gpu); err != nil {
			return err
		}
	}
	for i := 3; i < len(v); i++ {
		for _, x := range further.tensors {
			if x.Memory == t[i].Memory {
				return errs.Errorf(op, ErrUnsupported, "a tensor of the variant and %s are one tensor", names[i])
			}
		}
		if further.bias != nil && further.bias.Memory == t[i].Memory {
			return errs.Errorf(op, ErrUnsupported, "bias and %s are one tensor", names[i])
		}
		if further.sinks != nil && further.sinks.Memory == t[i].Memory {
			return errs.Errorf(op, ErrUnsupported, "sinks and %s are one tensor", names[i])
		}
		if err := t[i].NotWhole(); err != nil {
			return ongpu.TensorError(op, names[i], err)
		}
		if t[i].Replicas != nil {
			return errs.Errorf(op, ErrUnsupported, "%s is replicated over %v, and the result is on the first", names[i], gpu)
		}
		if err := checkDeviceResult(op, names[i], t[i], &p, i == 4); err != nil {
			return err
		}
		for j, x := range t[:i] {
			if x.Memory == t[i].Memory {
				return errs.Errorf(op, ErrUnsupported, "%s and %s are one tensor", names[j], names[i])
			}
		}
	}
	r := denseRuns.Get().(*denseRun)
	defer denseRuns.Put(r)
	if err := r.setLengths(op, &p, c, a); err != nil {
		return err
	}
	if err := r.setTrees(op, &p, c, a.Parents); err != nil {
		return err
	}
	defer r.forgetTrees()
	values := append(v, further.values()...)
	for _, s := range a.Segments {
		values = append(values, s.K, s.V)
	}
	var segments []segmentThere
	if len(a.Segments) > 0 {
		if segments, err = p.segmentsThere(op, a.Segments, c, t[3], t[4]); err != nil {
			return err
		}
	}
	attend := func(p *problem, c *config, k, v, out, lse *ongpu.Tensor, further *furtherThere) error {
		t, names := [...]*ongpu.Tensor{t[0], k, v, out, lse}, [...]string{"q", "k", "v", "out", "lse"}
		return r.attendDevice(op, gpu, p, c, [2]*ongpu.Tensor{k, v}, false, func(sub *queue.Submission) (o ongpu.AttentionOperands, err error) {
			for i, to := range [...]*ongpu.Mem{&o.Q, &o.Pages[0].Data, &o.Pages[1].Data, &o.Out, &o.LSE} {
				if t[i] == nil {
					break
				}
				if (i == 1 || i == 2) && t[i].Shards != nil {
					continue
				}
				if *to, err = t[i].UseAs(sub, names[i]); err != nil {
					return o, err
				}
				if i > 2 {
					sub.Written(t[i].Memory)
				}
			}
			if err := beside.use(sub, &o); err != nil {
				return o, err
			}
			err = further.use(sub, &o)
			return o, err
		}, append(values, beside.entropy.Value(), beside.mass.Value())...)
	}
	if len(segments) == 0 {
		return attend(&p, c, t[1], t[2], t[3], t[4], &further)
	}
	return attendSegments(gpu, op, &p, segments, t[3], t[4], func(to State) error {
		return attend(&p, c, t[1], t[2], ongpu.Must(to.Out), ongpu.Must(to.LSE), &further)
	}, func(i int, to State) error {
		s := &segments[i]
		r.setSegment(&s.problem, &a.Segments[i])
		return attend(&s.problem, &s.asked, s.k, s.v, ongpu.Must(to.Out), ongpu.Must(to.LSE), &furtherThere{})
	})
}

// besides are the tensors that receive entropies and attention mass; nil: not wanted.
type besides struct{ entropy, mass *ongpu.Tensor }

// besideThere returns those of a. others are the other operands.
func besideThere(op string, p *problem, a *Args, c *config, others []*ongpu.Tensor) (b besides, err error) {
	for _, x := range [...]struct {
		of    role
		v     G.Value
		to    **ongpu.Tensor
		goes  func(op string, p *problem, a *Args) error
		tiles bool
	}{{roleEntropy, a.Entropy, &b.entropy, c.entropyGoes, false}, {roleMass, a.Mass, &b.mass, c.massGoes, true}} {
		if x.v == nil {
			continue
		}
		if err := x.goes(op, p, a); err != nil {
			return b, err
		}
		name, t, want := x.of.String(), ongpu.Must(x.v), p.lseShape()
		if x.tiles {
			want = p.dims(attn.Ceil(p.keys, c.tileTokens))
		}
		if err := t.NotWhole(); err != nil {
			return b, ongpu.TensorError(op, name, err)
		}
		switch {
		case t.Replicas != nil:
			return b, errs.Errorf(op, ErrUnsupported, "%s is replicated over %v, and the result is on the first", name, t.GPU)
		case t.DType != operand.LSEType(p.query):
			return b, errs.Errorf(op, ErrDType, "%s is %v; for a q of %v it must be %v", name, t.DType, p.query, operand.LSEType(p.query))
		case !slices.Equal(t.Shape, want):
			return b, errs.Errorf(op, ErrShape, "%s has shape %v; it must be %v", name, t.Shape, want)
		}
		for _, other := range others {
			if other != nil && other.Memory == t.Memory {
				return b, errs.Errorf(op, ErrUnsupported, "%s shares memory with another operand", name)
			}
		}
		*x.to, others = t, append(others, t)
	}
	return b, nil
}

// use adds the memory of b to o.
func (b *besides) use(sub *queue.Submission, o *ongpu.AttentionOperands) (err error) {
	if b.entropy != nil {
		if o.Entropy, err = b.entropy.UseAs(sub, roleEntropy.String()); err != nil {
			return err
		}
		sub.Written(b.entropy.Memory)
	}
	if b.mass != nil {
		if o.Mass, err = b.mass.UseAs(sub, roleMass.String()); err != nil {
			return err
		}
		sub.Written(b.mass.Memory)
		o.Places = b.mass.Shape[len(b.mass.Shape)-1]
	}
	return nil
}

// segmentThere is a segment on a GPU, with its problem and options.
type segmentThere struct {
	problem problem
	asked   config
	k, v    *ongpu.Tensor
}

// segmentsThere checks segments, and that they share no tensor with results.
func (p *problem) segmentsThere(op string, segments []Segment, c *config, results ...*ongpu.Tensor) ([]segmentThere, error) {
	all := make([]segmentThere, len(segments))
	for i := range segments {
		s := &all[i]
		s.k, s.v = ongpu.Must(segments[i].K), ongpu.Must(segments[i].V)
		for _, x := range [...]struct {
			name string
			*ongpu.Tensor
		}{{segmentName(i, "k"), s.k}, {segmentName(i, "v"), s.v}} {
			if err := x.NotWhole(); err != nil {
				return nil, ongpu.TensorError(op, x.name, err)
			}
			for _, to := range results {
				if to != nil && to.Memory == x.Memory {
					return nil, errs.Errorf(op, ErrUnsupported, "%s shares memory with a result", x.name)
				}
			}
		}
		var err error
		if s.problem, s.asked, err = p.segment(op, i, &segments[i], s.k.Operand(segmentName(i, "k")), s.v.Operand(segmentName(i, "v")), c); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// attendSegments computes the states of the own keys and of all segments, and merges them into out and, if not nil, lse.
func attendSegments(g *ongpu.GPU, op string, p *problem, segments []segmentThere, out, lse *ongpu.Tensor, own func(to State) error, segment func(i int, to State) error) (err error) {
	fresh := func(shape tensor.Shape) (*ongpu.Tensor, error) {
		if err := g.Enter(op); err != nil {
			return nil, err
		}
		defer g.Group.Leave()
		return g.Alloc(op, tensor.Float32, shape)
	}
	states := make([]State, 1+len(segments))
	for i := range states {
		for _, x := range [...]struct {
			to   *G.Value
			last int
		}{{&states[i].Out, p.valueDim}, {&states[i].LSE, 0}} {
			d, err := fresh(p.dims(x.last))
			if err != nil {
				return err
			}
			defer func() { _ = d.Free() }() // what is queued may still use it
			*x.to = d.Value()
		}
		if i == 0 {
			err = own(states[0])
		} else {
			err = segment(i-1, states[i])
		}
		if err != nil {
			return err
		}
	}
	return mergeOn(g, op, out, lse, states)
}

// furtherThere is the optional operands of attention on a GPU; nil: none.
type furtherThere struct {
	bias, sinks *ongpu.Tensor
	tensors     []*ongpu.Tensor // of a variant
}

// furtherThere checks the bias and the sinks, each of which may be nil, and notes them in c.
func (p *problem) furtherThere(op string, gpu *ongpu.GPU, bias, sinks G.Value, c *config) (f furtherThere, err error) {
	for _, x := range [...]struct {
		name string
		v    G.Value
		to   **ongpu.Tensor
	}{{"bias", bias, &f.bias}, {"sinks", sinks, &f.sinks}} {
		if x.v == nil {
			continue
		}
		d, ok := ongpu.Of(x.v)
		if !ok || d == nil || d.GPU != gpu {
			return f, errs.Errorf(op, ErrUnsupported, "q is on %v and %s %s: they must be in one place", gpu, x.name, ongpu.InPlace(ongpu.PlaceOf(x.v), gpu))
		}
		*x.to = d
	}
	if f.bias != nil {
		if c.score.Bias, err = p.biasOf(op, f.bias.Operand("bias")); err != nil {
			return f, err
		}
	}
	if f.sinks != nil {
		c.score.Sinks = true
		err = checkSinks(op, f.sinks.Operand("sinks"), p.heads, p.query)
	}
	return f, err
}

// use adds the memory of bias and sinks to o.
func (f *furtherThere) use(sub *queue.Submission, o *ongpu.AttentionOperands) (err error) {
	if f.bias != nil {
		if o.Bias, err = f.bias.UseAs(sub, "bias"); err != nil {
			return err
		}
	}
	if f.sinks != nil {
		if o.Sinks, err = f.sinks.UseAs(sub, "sinks"); err != nil {
			return err
		}
	}
	return ongpu.UseTensors(sub, f.tensors, o)
}

// all returns all of f; nil: none.
func (f *furtherThere) all() []*ongpu.Tensor {
	return append([]*ongpu.Tensor{f.bias, f.sinks}, f.tensors...)
}

// values are those of all.
func (f *furtherThere) values() (values []G.Value) {
	for _, t := range f.all() {
		values = append(values, t.Value())
	}
	return values
}

// checkDeviceResult is checkResult for a tensor on a GPU.
func checkDeviceResult(op, name string, t *ongpu.Tensor, p *problem, lse bool) error {
	dtype, last := p.query, p.valueDim
	if lse {
		dtype, last = operand.LSEType(p.query), 0
	}
	if t.DType != dtype {
		return errs.Errorf(op, ErrDType, "%s is %v; for a q of %v it must be %v", name, t.DType, p.query, dtype)
	}
	if want := p.dims(last); !slices.Equal(t.Shape, want) {
		return errs.Errorf(op, ErrShape, "%s has shape %v; it must be %v", name, t.Shape, want)
	}
	return nil
}

// attendDevice queues a checked problem whose lengths are in r. It
// keeps the values that operands refers to until that is done. Keys and values may be
// sharded by heads: then operands leaves them out, and each GPU attends to its own. fixed: a recording may have the work, since
// all runs have these lengths.
func (r *denseRun) attendDevice(op string, gpu *ongpu.GPU, p *problem, c *config, kv [2]*ongpu.Tensor, fixed bool, operands func(*queue.Submission) (ongpu.AttentionOperands, error), values ...G.Value) error {
	defer runtime.KeepAlive(values)
	whole := p.geometry(c)
	heads, err := p.sharding(op, kv)
	if err != nil {
		return err
	}
	if b := &whole.Bias; len(heads) > 1 && b.Heads > 1 {
		return errs.Errorf(op, ErrUnsupported, "a bias of %d heads, and keys and values sharded by heads over %d GPUs", b.Heads, len(heads))
	}
	if len(heads) > 1 && whole.Variant != nil {
		return errs.Errorf(op, ErrUnsupported, "WithVariant, and keys and values sharded by heads over %d GPUs: one GPU takes it", len(heads))
	}
	if len(heads) > 1 && whole.Measures {
		return errs.Errorf(op, ErrUnsupported, "entropies or attention mass, and keys and values sharded by heads over %d GPUs: one GPU has them", len(heads))
	}
	parts := make([]attn.Problem, len(heads))
	for i := range parts {
		parts[i] = heads[i].Part(whole)
		if err := gpu.Members[i].Supports(op, &parts[i]); err != nil {
			return err
		}
	}
	if err := gpu.Enter(op); err != nil {
		return err
	}
	defer gpu.Group.Leave()
	if err := r.layOut(op, p, c); err != nil {
		return err
	}
	plans, recording := make([]ongpu.AttentionPlan, len(parts)), gpu.Group.Recording()
	if recording && (!fixed || len(parts) > 1) { // the schedule would be the host's at each replay
		return errs.Errorf(op, ErrUnsupported, "attention in a recording: that on a cache can be recorded, and that of a node on one GPU without lengths")
	}
	for i := range plans {
		m := gpu.Members[i]
		if recording {
			if plans[i], err = m.RecordedPlan(op, parts[i], r.sequences); err != nil {
				return err
			}
			continue
		}
		plans[i] = m.TakePlan()
		defer m.GivePlan(plans[i])
		if err := m.BuildPlan(op, plans[i], parts[i], r.sequences, 0, nil); err != nil {
			return err
		}
	}
	err = gpu.Queue.Submit(func(sub *queue.Submission) error {
		o, err := operands(sub)
		if err != nil {
			return err
		}
		if !recording {
			if err := sub.Do(func(s *cuda.Stream) error { return uploadAll(s, plans) }); err != nil {
				return err
			}
		}
		if len(plans) == 1 {
			return sub.Do(func(s *cuda.Stream) error { return plans[0].Run(s, &o) })
		}
		return sub.Each(func(i int, sub *queue.Submission) (err error) {
			mine := heads[i].Operands(&whole, &o)
			if mine.Pages[0].Data, err = kv[0].UseShard(sub, i, "k"); err != nil {
				return err
			}
			if mine.Pages[1].Data, err = kv[1].UseShard(sub, i, "v"); err != nil {
				return err
			}
			return sub.Do(func(s *cuda.Stream) error { return plans[i].Run(s, &mine) })
		})
	})
	if err != nil {
		return ongpu.EngineError(op, "attend", err)
	}
	return nil
}

// fixed says whether all runs of a node have the same lengths and drop the same weights.
func (c *config) fixed() bool {
	return !slices.ContainsFunc(c.inputs(), func(of role) bool { return of == roleLengths || of == roleQueryLengths || of == roleSeed })
}

func uploadAll(s *cuda.Stream, plans []ongpu.AttentionPlan) error {
	for _, p := range plans {
		if err := p.Upload(s); err != nil {
			return err
		}
	}
	return nil
}

// sharding returns the KV heads of each GPU. The first GPU has all, unless keys and values are sharded by heads.
func (p *problem) sharding(op string, kv [2]*ongpu.Tensor) ([]ongpu.Heads, error) {
	k, v := kv[0], kv[1]
	if k.Shards == nil && v.Shards == nil {
		return []ongpu.Heads{{N: p.kvHeads}}, nil
	}
	for i, t := range kv {
		name := "kv"[i : i+1]
		if t.Shards == nil {
			return nil, errs.Errorf(op, ErrUnsupported, "%s is whole and %s is sharded", name, "vk"[i:i+1])
		}
		if t.Axis != p.rank-3 {
			return nil, errs.Errorf(op, ErrUnsupported, "%s is sharded on axis %d of shape %v; attention takes those that are sharded by heads, on axis %d", name, t.Axis, t.Shape, p.rank-3)
		}
	}
	heads := make([]ongpu.Heads, len(k.Shards))
	for i := range heads {
		heads[i] = ongpu.HeadsOf(p.kvHeads, len(heads), i)
	}
	return heads, nil
}

// doDevice is Do on tensors of a GPU; the lengths are in r. The output goes to a new value of the
// node, or to one that is given.
func (op *attentionOp) doDevice(name string, r *denseRun, gpu *ongpu.GPU, in []G.Value, further furtherThere, to *ongpu.Tensor) (out, lse *ongpu.Tensor, err error) {
	qkv := ongpu.QKVOf(in)
	c, memory := op.config, op.memory.On(gpu.Group, 0)
	entropyStore, massStore := op.entropy.asked(), op.mass.asked()
	c.measures = entropyStore != nil || massStore != nil
	if massStore != nil {
		if err := c.massFits(name, gpu); err != nil {
			return nil, nil, err
		}
	}
	var entropy, mass *ongpu.Tensor
	err = r.attendDevice(name, gpu, &op.problem, &c, [2]*ongpu.Tensor{qkv[1], qkv[2]}, op.config.fixed(), func(sub *queue.Submission) (o ongpu.AttentionOperands, err error) {
		if o, err = qkv.Operands(sub); err != nil {
			return o, err
		}
		if err = further.use(sub, &o); err != nil {
			return o, err
		}
		if out, o.Out, err = qkv.ResultIn(sub, to, &op.memory, op.query, op.outShape()); err != nil {
			return o, err
		}
		if op.logs() != nil {
			if lse, o.LSE, err = qkv.LogSumExp(sub, &op.memory, operand.LSEType(op.query), op.lseShape()); err != nil {
				return o, err
			}
			if v := op.score.Variant; v != nil && v.Unnormalised { // there is none: the gradient's input has any numbers
				o.LSE = ongpu.Mem{}
			}
		}
		if entropyStore != nil {
			if entropy, o.Entropy, err = qkv.Beside(sub, &memory.Entropy, operand.LSEType(op.query), op.lseShape()); err != nil {
				return o, err
			}
		}
		if massStore != nil {
			o.Places = int(op.mass.places.Load())
			mass, o.Mass, err = qkv.Beside(sub, &memory.Mass, operand.LSEType(op.query), op.dims(o.Places))
		}
		return o, err
	}, slices.Concat(in, further.values())...)
	if err == nil {
		entropyStore.put(entropies, out.Value(), entropy.Value())
		massStore.put(masses, out.Value(), mass.Value())
	}
	return out, lse, err
}

// massFits returns an error if a GPU has no attention mass of LeanTiles of the size that is set.
func (c *config) massFits(op string, gpu *ongpu.GPU) error {
	if c.tileTokens%attention.MassTile != 0 {
		return errs.Errorf(op, ErrUnsupported, "attention mass of LeanTiles of %d keys, on %v: on a GPU they have a multiple of %d", c.tileTokens, gpu, attention.MassTile)
	}
	return nil
}

// mergeDevice is [Merge] on tensors of a GPU.
func mergeDevice(op string, dst State, states []State) error {
	if len(states) == 0 {
		return errs.Errorf(op, ErrShape, "no states")
	}
	names, values := []string{"dst.Out", "dst.LSE"}, []G.Value{dst.Out, dst.LSE}
	for i, s := range states {
		names, values = append(names, fmt.Sprintf("state %d's Out", i), fmt.Sprintf("state %d's LSE", i)), append(values, s.Out, s.LSE)
	}
	gpu, err := ongpu.SamePlace(op, names, values)
	if err != nil {
		return err
	}
	all := make([]*ongpu.Tensor, len(values))
	for i, v := range values {
		d := ongpu.Must(v)
		all[i] = d
		if err := d.NotWhole(); err != nil {
			return ongpu.TensorError(op, names[i], err)
		}
		if i < 2 && d.Replicas != nil {
			return errs.Errorf(op, ErrUnsupported, "%s is replicated over %v, and the result is on the first", names[i], gpu)
		}
		if d.DType != tensor.Float32 {
			return errs.Errorf(op, ErrDType, "%s is %v; on a GPU states are of float32", names[i], d.DType)
		}
		out := all[0].Shape
		if len(out) < 2 {
			return errs.Errorf(op, ErrShape, "dst.Out has shape %v, want (..., dv)", out)
		}
		if want := out[:len(out)-i%2]; !slices.Equal(d.Shape, want) {
			return errs.Errorf(op, ErrShape, "%s has shape %v; with a dst.Out of %v it must be %v", names[i], d.Shape, out, want)
		}
		for j := range min(i, 2) {
			if d.Memory == all[j].Memory {
				return errs.Errorf(op, ErrUnsupported, "%s and %s share memory", names[j], names[i])
			}
		}
	}
	return mergeOn(gpu, op, all[0], all[1], states)
}

// merge queues the merging of checked states. lse may be nil.
func mergeOn(g *ongpu.GPU, op string, out, lse *ongpu.Tensor, states []State) error {
	if err := g.Enter(op); err != nil {
		return err
	}
	defer g.Group.Leave()
	defer runtime.KeepAlive(states)
	defer runtime.KeepAlive([]*ongpu.Tensor{out, lse})
	kernels, err := g.Layers(op)
	if err != nil {
		return err
	}
	dim := out.Shape[len(out.Shape)-1]
	err = g.Queue.Submit(func(sub *queue.Submission) (failed error) {
		o := layers.States{Rows: out.Size() / dim, Dim: dim}
		if o.Out, err = out.UseAs(sub, "dst.Out"); err != nil {
			return err
		}
		sub.Written(out.Memory)
		if lse != nil {
			if o.LSE, err = lse.UseAs(sub, "dst.LSE"); err != nil {
				return err
			}
			sub.Written(lse.Memory)
		}
		for i, s := range states {
			x, err := ongpu.Must(s.Out).UseAs(sub, fmt.Sprintf("state %d's Out", i))
			if err != nil {
				return err
			}
			l, err := ongpu.Must(s.LSE).UseAs(sub, fmt.Sprintf("state %d's LSE", i))
			if err != nil {
				return err
			}
			o.Outs, o.LSEs = append(o.Outs, x), append(o.LSEs, l)
		}
		if n := o.Needs(); n > 0 {
			scratch, err := g.Wrap(sub, tensor.Float32, tensor.Shape{n}, sub.Alloc)
			if err != nil {
				return err
			}
			if !sub.Recording() { // which keeps it
				defer func() { failed = errors.Join(failed, sub.Free(scratch.Memory)) }()
			}
			if o.Scratch, err = scratch.Use(sub); err != nil {
				return err
			}
		}
		return sub.Do(func(s *cuda.Stream) error { return kernels.MergeStates(s, &o) })
	})
	if err != nil {
		return ongpu.EngineError(op, "merge", err)
	}
	return nil
}
