package leanattention

import (
	"errors"
	"fmt"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/device"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// attendDevice is [Attend] on tensors of a GPU; v are q, k, v, out and, if
// wanted, the log-sum-exp.
func attendDevice(op string, gpu *GPU, v []G.Value, a *Args, c *config) error {
	names := [...]string{"q", "k", "v", "out", "lse"}
	var t [5]*DeviceTensor
	var o [3]operand
	for i := range v {
		t[i] = v[i].(*DeviceTensor)
		if i < 3 {
			o[i] = t[i].operand(names[i])
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
	for i := 3; i < len(v); i++ {
		if further.bias != nil && further.bias.memory == t[i].memory {
			return errs.Errorf(op, ErrUnsupported, "bias and %s are one tensor", names[i])
		}
		if further.sinks != nil && further.sinks.memory == t[i].memory {
			return errs.Errorf(op, ErrUnsupported, "sinks and %s are one tensor", names[i])
		}
		if err := t[i].notWhole(); err != nil {
			return tensorError(op, names[i], err)
		}
		if t[i].replicas != nil {
			return errs.Errorf(op, ErrUnsupported, "%s is replicated over %v, and the result is on the first", names[i], gpu)
		}
		if err := checkDeviceResult(op, names[i], t[i], &p, i == 4); err != nil {
			return err
		}
		for j, x := range t[:i] {
			if x.memory == t[i].memory {
				return errs.Errorf(op, ErrUnsupported, "%s and %s are one tensor", names[j], names[i])
			}
		}
	}
	r := denseRuns.Get().(*denseRun)
	defer denseRuns.Put(r)
	if err := r.setLengths(op, &p, c, a); err != nil {
		return err
	}
	if err := r.setTrees(op, &p, c, a.Trees); err != nil {
		return err
	}
	defer r.forgetTrees()
	values := append(v, a.Bias, a.Sinks)
	for _, s := range a.Segments {
		values = append(values, s.K, s.V)
	}
	var segments []segmentThere
	if len(a.Segments) > 0 {
		if segments, err = p.segmentsThere(op, a.Segments, c, t[3], t[4]); err != nil {
			return err
		}
	}
	attend := func(p *problem, c *config, k, v, out, lse *DeviceTensor, further *furtherThere) error {
		t, names := [...]*DeviceTensor{t[0], k, v, out, lse}, [...]string{"q", "k", "v", "out", "lse"}
		return r.attendDevice(op, gpu, p, c, [2]*DeviceTensor{k, v}, func(sub *device.Submission) (o deviceOperands, err error) {
			for i, to := range [...]*deviceMemory{&o.Q, &o.K, &o.V, &o.Out, &o.LSE} {
				if t[i] == nil {
					break
				}
				if (i == 1 || i == 2) && t[i].shards != nil {
					continue
				}
				if *to, err = t[i].useAs(sub, names[i]); err != nil {
					return o, err
				}
				if i > 2 {
					sub.Written(t[i].memory)
				}
			}
			err = further.use(sub, &o)
			return o, err
		}, values...)
	}
	if len(segments) == 0 {
		return attend(&p, c, t[1], t[2], t[3], t[4], &further)
	}
	return gpu.attendSegments(op, &p, segments, t[3], t[4], func(to State) error {
		return attend(&p, c, t[1], t[2], to.Out.(*DeviceTensor), to.LSE.(*DeviceTensor), &further)
	}, func(i int, to State) error {
		s := &segments[i]
		r.setSegment(&s.problem, &a.Segments[i])
		return attend(&s.problem, &s.asked, s.k, s.v, to.Out.(*DeviceTensor), to.LSE.(*DeviceTensor), &furtherThere{})
	})
}

// segmentThere is a segment on a GPU, and what is asked for of it.
type segmentThere struct {
	problem problem
	asked   config
	k, v    *DeviceTensor
}

// segmentsThere checks segments, and that results are none of their tensors.
func (p *problem) segmentsThere(op string, segments []Segment, c *config, results ...*DeviceTensor) ([]segmentThere, error) {
	all := make([]segmentThere, len(segments))
	for i := range segments {
		s := &all[i]
		s.k, s.v = segments[i].K.(*DeviceTensor), segments[i].V.(*DeviceTensor)
		for _, x := range [...]struct {
			name string
			*DeviceTensor
		}{{segmentName(i, "k"), s.k}, {segmentName(i, "v"), s.v}} {
			if err := x.notWhole(); err != nil {
				return nil, tensorError(op, x.name, err)
			}
			for _, to := range results {
				if to != nil && to.memory == x.memory {
					return nil, errs.Errorf(op, ErrUnsupported, "%s shares memory with a result", x.name)
				}
			}
		}
		var err error
		if s.problem, s.asked, err = p.segment(op, i, &segments[i], s.k.operand(segmentName(i, "k")), s.v.operand(segmentName(i, "v")), c); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// attendSegments makes the states of own keys and of all segments, and merges them into out and, if it is not nil, lse.
func (g *GPU) attendSegments(op string, p *problem, segments []segmentThere, out, lse *DeviceTensor, own func(to State) error, segment func(i int, to State) error) (err error) {
	fresh := func(shape tensor.Shape) (*DeviceTensor, error) {
		if err := g.enter(op); err != nil {
			return nil, err
		}
		defer g.group.Leave()
		return g.newTensor(op, tensor.Float32, shape)
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
			*x.to = d
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
	return g.merge(op, out, lse, states)
}

// furtherThere are operands of an attention on a GPU beside q, k and v; nil: there is none.
type furtherThere struct{ bias, sinks *DeviceTensor }

// furtherThere checks the bias and the sinks of an attention on a GPU, each of which may be nil, and says in c
// what there is of them.
func (p *problem) furtherThere(op string, gpu *GPU, bias, sinks G.Value, c *config) (f furtherThere, err error) {
	for _, x := range [...]struct {
		name string
		v    G.Value
		to   **DeviceTensor
	}{{"bias", bias, &f.bias}, {"sinks", sinks, &f.sinks}} {
		if x.v == nil {
			continue
		}
		d, ok := x.v.(*DeviceTensor)
		if !ok || d == nil || d.gpu != gpu {
			return f, errs.Errorf(op, ErrUnsupported, "q is on %v and %s %s: they must be in one place", gpu, x.name, inPlace(placeOf(x.v), gpu))
		}
		*x.to = d
	}
	if f.bias != nil {
		if c.score.Bias, err = p.biasOf(op, f.bias.operand("bias")); err != nil {
			return f, err
		}
	}
	if f.sinks != nil {
		c.score.Sinks = true
		err = checkSinks(op, f.sinks.operand("sinks"), p.heads, p.query)
	}
	return f, err
}

// use is the memory of each, see [DeviceTensor.use].
func (f *furtherThere) use(sub *device.Submission, o *deviceOperands) (err error) {
	if f.bias != nil {
		if o.Bias, err = f.bias.useAs(sub, "bias"); err != nil {
			return err
		}
	}
	if f.sinks != nil {
		o.Sinks, err = f.sinks.useAs(sub, "sinks")
	}
	return err
}

// checkDeviceResult is checkResult for a tensor on a GPU.
func checkDeviceResult(op, name string, t *DeviceTensor, p *problem, lse bool) error {
	dtype, last := p.query, p.valueDim
	if lse {
		dtype, last = lseType(p.query), 0
	}
	if t.dtype != dtype {
		return errs.Errorf(op, ErrDType, "%s is %v; for a q of %v it must be %v", name, t.dtype, p.query, dtype)
	}
	if want := p.dims(last); !sameShape(t.shape, want) {
		return errs.Errorf(op, ErrShape, "%s has shape %v; it must be %v", name, t.shape, want)
	}
	return nil
}

// attendDevice queues a checked problem whose lengths are in r. It
// keeps the values that operands refers to until that is done. Keys and values may be
// sharded by heads: then operands leaves them out, and each GPU attends to its own.
func (r *denseRun) attendDevice(op string, gpu *GPU, p *problem, c *config, kv [2]*DeviceTensor, operands func(*device.Submission) (deviceOperands, error), values ...G.Value) error {
	defer runtime.KeepAlive(values)
	whole := p.geometry(c)
	heads, err := p.sharding(op, kv)
	if err != nil {
		return err
	}
	if b := &whole.Bias; len(heads) > 1 && b.Heads > 1 {
		return errs.Errorf(op, ErrUnsupported, "a bias of %d heads, and keys and values sharded by heads over %d GPUs", b.Heads, len(heads))
	}
	parts := make([]attn.Problem, len(heads))
	for i := range parts {
		parts[i] = heads[i].part(whole)
		if err := gpu.members[i].supports(op, &parts[i]); err != nil {
			return err
		}
	}
	if err := gpu.enter(op); err != nil {
		return err
	}
	defer gpu.group.Leave()
	if err := r.layOut(op, p, c); err != nil {
		return err
	}
	plans := make([]attentionPlan, len(parts))
	for i := range plans {
		m := gpu.members[i]
		plans[i] = m.takePlan()
		defer m.givePlan(plans[i])
		if err := m.buildPlan(op, plans[i], parts[i], r.sequences, 0, nil); err != nil {
			return err
		}
	}
	err = gpu.queue.Submit(func(sub *device.Submission) error {
		if sub.Recording() { // the schedule would be the host's at each replay
			return errs.Errorf(op, ErrUnsupported, "attention in a recording: only that on a cache can be recorded")
		}
		o, err := operands(sub)
		if err != nil {
			return err
		}
		if err := sub.Do(func(s *cuda.Stream) error { return uploadAll(s, plans) }); err != nil {
			return err
		}
		if len(plans) == 1 {
			return sub.Do(func(s *cuda.Stream) error { return plans[0].Run(s, &o) })
		}
		return sub.Each(func(i int, sub *device.Submission) (err error) {
			mine := heads[i].operands(&whole, &o)
			if mine.K, err = kv[0].useShard(sub, i, "k"); err != nil {
				return err
			}
			if mine.V, err = kv[1].useShard(sub, i, "v"); err != nil {
				return err
			}
			return sub.Do(func(s *cuda.Stream) error { return plans[i].Run(s, &mine) })
		})
	})
	if err != nil {
		return deviceEngineError(op, "attend", err)
	}
	return nil
}

func uploadAll(s *cuda.Stream, plans []attentionPlan) error {
	for _, p := range plans {
		if err := p.Upload(s); err != nil {
			return err
		}
	}
	return nil
}

// sharding is which KV heads each GPU has: all are the first one's, unless keys and values
// are sharded by them.
func (p *problem) sharding(op string, kv [2]*DeviceTensor) ([]headRange, error) {
	k, v := kv[0], kv[1]
	if k.shards == nil && v.shards == nil {
		return []headRange{{0, p.kvHeads}}, nil
	}
	for i, t := range kv {
		name := "kv"[i : i+1]
		if t.shards == nil {
			return nil, errs.Errorf(op, ErrUnsupported, "%s is whole and %s is sharded", name, "vk"[i:i+1])
		}
		if t.axis != p.rank-3 {
			return nil, errs.Errorf(op, ErrUnsupported, "%s is sharded on axis %d of shape %v; attention takes those that are sharded by heads, on axis %d", name, t.axis, t.shape, p.rank-3)
		}
	}
	heads := make([]headRange, len(k.shards))
	for i := range heads {
		heads[i] = dealt(p.kvHeads, len(heads), i)
	}
	return heads, nil
}

// doDevice is Do on tensors of a GPU; the lengths are in r. The output goes to a new value of the
// node, or to one that is given.
func (op *attentionOp) doDevice(name string, r *denseRun, gpu *GPU, in []G.Value, further furtherThere, to *DeviceTensor) (out, lse *DeviceTensor, err error) {
	qkv := operandTensors(in)
	err = r.attendDevice(name, gpu, &op.problem, &op.config, [2]*DeviceTensor{qkv[1], qkv[2]}, func(sub *device.Submission) (o deviceOperands, err error) {
		if o, err = qkv.operands(sub); err != nil {
			return o, err
		}
		if err = further.use(sub, &o); err != nil {
			return o, err
		}
		if out, o.Out, err = qkv.resultIn(sub, to, &op.memory, op.query, op.outShape()); err != nil || op.logs() == nil {
			return o, err
		}
		lse, o.LSE, err = qkv.logSumExp(sub, &op.memory, lseType(op.query), op.lseShape())
		return o, err
	}, slices.Concat(in, []G.Value{further.bias, further.sinks})...)
	return out, lse, err
}

// deviceQKV are the query, the key and the value of a node.
type deviceQKV [3]*DeviceTensor

func operandTensors(in []G.Value) (t deviceQKV) {
	for i := range t {
		t[i] = in[i].(*DeviceTensor)
	}
	return t
}

// operands is use where keys and values may be sharded: these are left out.
func (t *deviceQKV) operands(sub *device.Submission) (o deviceOperands, err error) {
	if t[1].shards != nil && t[2].shards != nil {
		o.Q, err = t[0].useAs(sub, "q")
	} else {
		o.Q, o.K, o.V, err = t.use(sub)
	}
	return o, err
}

// use is the memory of each, see [DeviceTensor.use].
func (t *deviceQKV) use(sub *device.Submission) (q, k, v deviceMemory, err error) {
	for i, to := range [...]*deviceMemory{&q, &k, &v} {
		if *to, err = t[i].useAs(sub, "qkv"[i:i+1]); err != nil {
			break
		}
	}
	return q, k, v, err
}

// resultIn is a new value of the node and its memory, or the value that is given. What t
// holds stays.
func (t *deviceQKV) resultIn(sub *device.Submission, to *DeviceTensor, n *ongpu.Node, dtype tensor.Dtype, shape tensor.Shape) (*DeviceTensor, deviceMemory, error) {
	if to != nil {
		m, err := to.useAs(sub, "out")
		return to, m, err
	}
	return inUse(sub)(t[0].gpu.nodeValue(sub, n, dtype, shape, t[:]...))
}

// logSumExp is a new log-sum-exp of the node.
func (t *deviceQKV) logSumExp(sub *device.Submission, n *ongpu.Node, dtype tensor.Dtype, shape tensor.Shape) (*DeviceTensor, deviceMemory, error) {
	gpu := t[0].gpu
	return inUse(sub)(gpu.nextValue(sub, &n.On(gpu.group, 0).Rest, dtype, shape, t[:]...))
}

// inUse gives the memory of a value that was made.
func inUse(sub *device.Submission) func(*DeviceTensor, error) (*DeviceTensor, deviceMemory, error) {
	return func(d *DeviceTensor, err error) (*DeviceTensor, deviceMemory, error) {
		if err != nil {
			return nil, deviceMemory{}, err
		}
		m, err := d.use(sub)
		return d, m, err
	}
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
	gpu, err := samePlace(op, names, values)
	if err != nil {
		return err
	}
	all := make([]*DeviceTensor, len(values))
	for i, v := range values {
		d := v.(*DeviceTensor)
		all[i] = d
		if err := d.notWhole(); err != nil {
			return tensorError(op, names[i], err)
		}
		if i < 2 && d.replicas != nil {
			return errs.Errorf(op, ErrUnsupported, "%s is replicated over %v, and the result is on the first", names[i], gpu)
		}
		if d.dtype != tensor.Float32 {
			return errs.Errorf(op, ErrDType, "%s is %v; on a GPU states are of float32", names[i], d.dtype)
		}
		out := all[0].shape
		if len(out) < 2 {
			return errs.Errorf(op, ErrShape, "dst.Out has shape %v, want (..., dv)", out)
		}
		if want := out[:len(out)-i%2]; !slices.Equal(d.shape, want) {
			return errs.Errorf(op, ErrShape, "%s has shape %v; with a dst.Out of %v it must be %v", names[i], d.shape, out, want)
		}
		for j := range min(i, 2) {
			if d.memory == all[j].memory {
				return errs.Errorf(op, ErrUnsupported, "%s and %s share memory", names[j], names[i])
			}
		}
	}
	return gpu.merge(op, all[0], all[1], states)
}

// merge queues the merging of checked states. lse may be nil.
func (g *GPU) merge(op string, out, lse *DeviceTensor, states []State) error {
	if err := g.enter(op); err != nil {
		return err
	}
	defer g.group.Leave()
	defer runtime.KeepAlive(states)
	defer runtime.KeepAlive([]*DeviceTensor{out, lse})
	layers, err := g.layers(op)
	if err != nil {
		return err
	}
	dim := out.shape[len(out.shape)-1]
	err = g.queue.Submit(func(sub *device.Submission) (failed error) {
		o := decoder.States{Rows: out.Size() / dim, Dim: dim}
		if o.Out, err = out.useAs(sub, "dst.Out"); err != nil {
			return err
		}
		sub.Written(out.memory)
		if lse != nil {
			if o.LSE, err = lse.useAs(sub, "dst.LSE"); err != nil {
				return err
			}
			sub.Written(lse.memory)
		}
		for i, s := range states {
			x, err := s.Out.(*DeviceTensor).useAs(sub, fmt.Sprintf("state %d's Out", i))
			if err != nil {
				return err
			}
			l, err := s.LSE.(*DeviceTensor).useAs(sub, fmt.Sprintf("state %d's LSE", i))
			if err != nil {
				return err
			}
			o.Outs, o.LSEs = append(o.Outs, x), append(o.LSEs, l)
		}
		if n := o.Needs(); n > 0 {
			scratch, err := g.wrap(sub, tensor.Float32, tensor.Shape{n}, sub.Alloc)
			if err != nil {
				return err
			}
			if !sub.Recording() { // which keeps it
				defer func() { failed = errors.Join(failed, sub.Free(scratch.memory)) }()
			}
			if o.Scratch, err = scratch.use(sub); err != nil {
				return err
			}
		}
		return sub.Do(func(s *cuda.Stream) error { return layers.MergeStates(s, &o) })
	})
	if err != nil {
		return deviceEngineError(op, "merge", err)
	}
	return nil
}

// queue queues the work of a layer. Its operands are on the first member; the others read
// and write what is for their heads there.
func (p *devicePlan) queue(sub *device.Submission, layer int, n newRows, o *deviceOperands) error {
	if len(p.now.parts) == 1 {
		o.K, o.V = p.layerPages(0, layer)
		return p.now.parts[0].queueAlone(sub, n, o)
	}
	if p.now.context != nil {
		return p.queueByContext(sub, layer, n, o)
	}
	p.lay(false)
	return sub.Each(func(i int, sub *device.Submission) error {
		part, g := &p.now.parts[i], &p.geometry
		heads := p.pages.parts[i].heads
		mine := heads.operands(g, o)
		mine.K, mine.V = p.layerPages(i, layer)
		rows := newRows{k: from(n.k, heads.first*g.Dim), v: from(n.v, heads.first*g.ValueDim)}
		if p.turns() {
			rows.turned = from(n.turned, heads.first*g.Group()*g.Query.Head)
		}
		return sub.Do(func(s *cuda.Stream) error {
			if err := rows.appendTo(part.plan, s, &mine, g.KVHeads); err != nil {
				return err
			}
			return part.plan.Run(s, &mine)
		})
	})
}

// operands are a member's part of queries, outputs, log-sum-exps and sinks: those of its heads.
func (r headRange) operands(all *attn.Problem, o *deviceOperands) deviceOperands {
	first := r.first * (all.Heads / all.KVHeads)
	mine := deviceOperands{Q: from(o.Q, first*all.Query.Head), Out: from(o.Out, first*all.Out.Head), Bias: o.Bias}
	if o.LSE.Buffer != nil {
		mine.LSE = from(o.LSE, first*all.LSE.Head)
	}
	if o.Sinks.Buffer != nil {
		mine.Sinks = from(o.Sinks, first)
	}
	return mine
}

// from is m from an element on.
func from(m deviceMemory, element int) deviceMemory {
	m.Offset += int64(element) * int64(m.DType.Size())
	m.Len -= element
	return m
}

// layerPages are the keys and values of a layer that a member has.
func (p *devicePlan) layerPages(member, layer int) (k, v deviceMemory) {
	at := func(b *cuda.Buffer) deviceMemory {
		return deviceMemory{Buffer: b, DType: p.pages.storage, Len: int(b.Len()) / p.pages.storage.Size()}
	}
	part := p.pages.parts[member]
	return at(part.keys[layer]), at(part.values[layer])
}
