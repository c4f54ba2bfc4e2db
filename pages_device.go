package leanattention

import (
	"errors"
	"fmt"
	"runtime"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/device"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/decoder"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// devicePages are pages in the memory of a GPU.
type devicePages struct {
	gpu          *GPU
	pages        int
	storage      attn.DType
	keys, values []*cuda.Buffer // one for each layer
}

func newDevicePages(op string, c *CacheConfig, storage attn.DType, keyElements, valueElements int) (*devicePages, error) {
	d := &devicePages{gpu: c.Device, pages: c.Pages, storage: storage}
	// The query heads are not known yet; the least there can be.
	g := (&tokenRows{heads: c.KVHeads}).geometry(c, &config{})
	if err := d.supports(op, &g); err != nil {
		return nil, err
	}
	if err := d.gpu.enter(op); err != nil {
		return nil, err
	}
	defer d.gpu.group.Leave()
	err := d.gpu.queue.Submit(func(sub *device.Submission) error {
		for range c.Layers {
			for _, x := range [...]struct {
				list     *[]*cuda.Buffer
				elements int
			}{{&d.keys, keyElements}, {&d.values, valueElements}} {
				b, err := sub.NewBuffer(int64(x.elements) * int64(storage.Size()))
				if err != nil {
					return err
				}
				*x.list = append(*x.list, b)
			}
		}
		return nil
	})
	if err == nil {
		return d, nil
	}
	err = errors.Join(err, d.close())
	if m, e := d.gpu.dev.Memory(); e == nil && errors.Is(err, cuda.ErrOutOfMemory) {
		asked := int64(c.Layers) * int64(keyElements+valueElements) * int64(storage.Size())
		return nil, fmt.Errorf("leanattention: %s: %d bytes asked for on %v, %d of %d free: %w", op, asked, d.gpu, m.Free, m.Total, err)
	}
	return nil, gpuError(op, err)
}

func (d *devicePages) where() string { return d.gpu.String() }

func (d *devicePages) supports(op string, g *attn.Problem) error {
	return d.gpu.supports(op, g)
}

// operands takes values that are all on the cache's GPU, or all in host memory:
// those are copied there and back.
func (d *devicePages) operands(op string, in []G.Value) (o [3]operand, err error) {
	names := []string{"q", "k", "v"}
	at, err := samePlace(op, names, in)
	if err != nil {
		return o, err
	}
	if at != nil && at != d.gpu {
		return o, errorf(op, ErrUnsupported, "q is on %v and the cache on %s", at, otherName(d.gpu, at))
	}
	for i, v := range in {
		if at != nil {
			o[i] = operand{names[i], v.Shape(), v.Dtype()}
			continue
		}
		t, err := denseValue(op, names[i], v)
		if err != nil {
			return o, err
		}
		o[i] = valueOperand(names[i], t)
	}
	return o, nil
}

func (d *devicePages) copyPages(op string, copies []pageCopy) error {
	if len(copies) == 0 {
		return nil
	}
	if err := d.gpu.enter(op); err != nil {
		return err
	}
	defer d.gpu.group.Leave()
	err := d.gpu.queue.Submit(func(sub *device.Submission) error {
		return sub.Do(func(s *cuda.Stream) error {
			for _, buffers := range [...][]*cuda.Buffer{d.keys, d.values} {
				for _, b := range buffers {
					n := b.Len() / int64(d.pages)
					for _, c := range copies {
						if err := s.Copy(b, int64(c.to)*n, b, int64(c.from)*n, n); err != nil {
							return err
						}
					}
				}
			}
			return nil
		})
	})
	if err != nil {
		return gpuError(op, err)
	}
	return nil
}

func (d *devicePages) transfer(op string, t *pageTransfer, in bool) error {
	if err := d.gpu.enter(op); err != nil {
		return err
	}
	defer d.gpu.group.Leave()
	if err := d.transferNow(t, in); err != nil {
		return gpuError(op, err)
	}
	return nil
}

// transferNow is transfer with the GPU entered. Small copies to the GPU may be put off
// until somebody waits for them, which so tells what went wrong with them.
func (d *devicePages) transferNow(t *pageTransfer, in bool) error {
	b := d.keys[t.layer]
	if t.values {
		b = d.values[t.layer]
	}
	q := d.gpu.queue
	p, err := q.TakePinned(len(t.memory))
	if err != nil {
		return err
	}
	defer q.GivePinned(p)
	if in {
		copy(p.Bytes, t.memory)
	}
	err = q.Submit(func(sub *device.Submission) error {
		at := 0
		for _, s := range t.spans {
			var err error
			if in {
				err = sub.Upload(b, int64(s.at), p, at, s.n)
			} else {
				err = sub.Download(p, at, b, int64(s.at), s.n)
			}
			if err != nil {
				return err
			}
			at += s.n
		}
		return sub.Mark(p)
	})
	if err == nil {
		err = q.Wait(p)
	}
	if err == nil && !in {
		copy(t.memory, p.Bytes)
	}
	return err
}

// close gives the memory back; the GPU may be closed already, and then it is
// given back. The driver waits for queued work.
func (d *devicePages) close() (first error) {
	for _, buffers := range [...][]*cuda.Buffer{d.keys, d.values} {
		for _, b := range buffers {
			if err := b.Close(); err != nil && first == nil && !errors.Is(err, cuda.ErrClosed) {
				first = err
			}
		}
	}
	d.keys, d.values = nil, nil
	return first
}

func (d *devicePages) newPlan(step *Step, g attn.Problem) layerPlan {
	return &devicePlan{pages: d, step: step, geometry: g}
}

// devicePlan is a layerPlan for a GPU's engine.
type devicePlan struct {
	pages    *devicePages
	step     *Step
	geometry attn.Problem
	plan     attentionPlan // nil before the first build
}

func (p *devicePlan) build(op string, seqs []attn.Sequence, rows int) error {
	gpu := p.pages.gpu
	if err := gpu.enter(op); err != nil {
		return err
	}
	defer gpu.group.Leave()
	if p.plan == nil {
		p.plan = gpu.takePlan()
		// A step has no Close: its plans come back when it is garbage.
		runtime.AddCleanup(p, gpu.givePlan, p.plan)
		// Steps of any lengths look alike then, to a recording.
		if err := p.plan.Reserve(capacity(rows, p.pages.pages)); err != nil {
			return deviceEngineError(op, "plan", err)
		}
	}
	if err := gpu.buildPlan(op, p.plan, p.geometry, seqs, rows); err != nil {
		return err
	}
	if err := gpu.queue.Submit(func(sub *device.Submission) error { return sub.Do(p.plan.Upload) }); err != nil {
		return deviceEngineError(op, "plan", err)
	}
	return nil
}

func (p *devicePlan) attend(op string, c *layerCall) (out, lse G.Value, err error) {
	if err := p.pages.gpu.enter(op); err != nil {
		return nil, nil, err
	}
	defer p.pages.gpu.group.Leave()
	if _, ok := c.qkv[0].(*DeviceTensor); ok {
		out, lse, err = p.attendThere(c)
	} else {
		out, lse, err = p.attendFromHost(c)
	}
	if err != nil {
		return nil, nil, deviceEngineError(op, c.node.String(), err)
	}
	return out, lse, nil
}

// queue queues the work of a layer.
func (p *devicePlan) queue(sub *device.Submission, layer int, k, v deviceMemory, o *deviceOperands) error {
	at := func(b *cuda.Buffer) deviceMemory {
		return deviceMemory{Buffer: b, DType: p.pages.storage, Len: int(b.Len()) / p.pages.storage.Size()}
	}
	o.K, o.V = at(p.pages.keys[layer]), at(p.pages.values[layer])
	// In a recording it may be a part of the megakernel that makes q, k and v, or the launch
	// that makes them may store k and v.
	stored := false
	if plan, ok := p.plan.(*attention.Plan); ok {
		switch late := sub.Deferred().(type) {
		case *decoder.Megakernel:
			if late.Attend(plan, o, k, v) {
				return nil
			}
		case *decoder.Projection:
			stored = late.Append(plan, o.K, o.V, k, v)
		}
	}
	return sub.Do(func(s *cuda.Stream) error {
		if !stored {
			if err := p.plan.Append(s, o.K, o.V, k, v); err != nil {
				return err
			}
		}
		return p.plan.Run(s, o)
	})
}

// attendThere is attend on tensors of the GPU: it waits for nothing.
func (p *devicePlan) attendThere(c *layerCall) (out, lse G.Value, err error) {
	qkv := operandTensors(c.qkv)
	defer runtime.KeepAlive(c)
	var o, l *DeviceTensor
	err = p.pages.gpu.queue.Submit(func(sub *device.Submission) error {
		q, k, v, err := qkv.use(sub)
		if err != nil {
			return err
		}
		operands := deviceOperands{Q: q}
		if o, operands.Out, err = qkv.resultIn(sub, c.out, c.memory, c.rows.query, c.rows.outShape(p.geometry.ValueDim)); err != nil {
			return err
		}
		if c.lse {
			if l, operands.LSE, err = qkv.logSumExp(sub, c.memory, c.rows.lseType(), c.rows.lseShape()); err != nil {
				return err
			}
		}
		if err := p.queue(sub, c.node.layer, k, v, &operands); err != nil {
			return err
		}
		p.step.record(sub, c.node, p.plan)
		return haveRead(sub, qkv[:]...)
	})
	if err != nil {
		return nil, nil, err
	}
	if l == nil {
		return o, nil, nil
	}
	return o, l, nil
}

// attendFromHost is attend on tensors of the host: one copy there, one back, and
// one wait.
func (p *devicePlan) attendFromHost(c *layerCall) (out, lse G.Value, err error) {
	q := p.pages.gpu.queue
	var s stage
	var parts [5]part
	for i, v := range c.qkv {
		parts[i] = s.add(rowMajorBytes(v.(*tensor.Dense)), c.rows.query)
	}
	up := s.bytes
	o := tensor.New(tensor.Of(c.rows.query), tensor.WithShape(c.rows.outShape(p.geometry.ValueDim)...))
	parts[3] = s.add(rowMajorBytes(o), c.rows.query)
	if c.lse {
		l := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(c.rows.lseShape()...))
		parts[4], lse = s.add(rowMajorBytes(l), tensor.Float32), l
	}
	defer runtime.KeepAlive(c)

	pinned, err := q.TakePinned(max(up, s.bytes-up))
	if err != nil {
		return nil, nil, err
	}
	defer q.GivePinned(pinned)
	for _, x := range parts[:3] {
		copy(pinned.Bytes[x.at:], x.host)
	}
	err = q.Submit(func(sub *device.Submission) error {
		m, err := sub.Alloc(int64(s.bytes))
		if err != nil {
			return err
		}
		defer sub.Free(m) // whoever takes it next queues behind this
		b, err := sub.Use(m, sub.Generation(m))
		if err != nil {
			return err
		}
		if err := sub.Upload(b, 0, pinned, 0, up); err != nil {
			return err
		}
		operands := &deviceOperands{Q: parts[0].in(b), Out: parts[3].in(b)}
		if c.lse {
			operands.LSE = parts[4].in(b)
		}
		if err := p.queue(sub, c.node.layer, parts[1].in(b), parts[2].in(b), operands); err != nil {
			return err
		}
		if err := sub.Download(pinned, 0, b, int64(up), s.bytes-up); err != nil {
			return err
		}
		return sub.Mark(pinned)
	})
	if err != nil {
		return nil, nil, err
	}
	if err := q.Wait(pinned); err != nil {
		return nil, nil, err
	}
	for _, x := range parts[3:] {
		copy(x.host, pinned.Bytes[max(x.at-up, 0):])
	}
	return o, lse, nil
}

// stage lays operands out one behind the other, as they are on the GPU.
type stage struct{ bytes int }

// part is one of them.
type part struct {
	host []byte
	at   int
	t    attn.DType
}

// add places an operand at an address that kernels and copies like.
func (s *stage) add(host []byte, t tensor.Dtype) part {
	const align = 256
	p := part{host: host, at: s.bytes}
	p.t, _ = storageType(t)
	s.bytes += (len(host) + align - 1) / align * align
	return p
}

func (p *part) in(b *cuda.Buffer) deviceMemory {
	return deviceMemory{Buffer: b, Offset: int64(p.at), DType: p.t, Len: len(p.host) / p.t.Size()}
}
