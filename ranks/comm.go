package ranks

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/queue"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/nccl"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/rendezvous"
)

// failure is the failure of a rank, which ends all ranks.
type failure struct {
	rank   int
	reason string
}

func (e *failure) Error() string { return fmt.Sprintf("rank %d: %s", e.rank, e.reason) }

// Is says that it is leanattention.ErrRank.
func (e *failure) Is(target error) bool { return target == queue.ErrRank }

// rankError makes a failure of an error of a session.
func rankError(err error) error {
	var e *rendezvous.Error
	if errors.As(err, &e) {
		return &failure{e.Rank, e.Reason}
	}
	return err
}

// Comm is the connection of this process to the other ranks. Several goroutines may use a Comm at once if all ranks call
// barriers and collectives in the same order.
//
// A Comm is used by its pointer. The use of a copy is ErrState.
type Comm struct {
	mark    nocopy.Mark
	world   World
	gpu     *device.GPU         // nil: collectives are in host memory
	members []member            // of the GPU value
	session *rendezvous.Session // nil: as well
	checks  []func()            // to be called when the Comm has ended: nobody asks it any more whether ranks have failed

	waits   atomic.Int64  // calls of the driver, at present
	since   atomic.Int64  // when the first of them began, in nanoseconds from start on
	start   time.Time     // of the clock
	stop    chan struct{} // closed by Close
	guarded chan struct{} // closed when guard has ended

	mu     sync.Mutex
	closed bool
}

// member is one of this process's GPUs. It is a rank of a communicator of its own, whose other ranks are the same members of the other
// processes.
type member struct {
	dev  *cuda.Device
	nccl *nccl.Comm // nil: this process is alone
}

const (
	beat    = time.Second      // from one sign of life of a rank to the next
	silence = 10 * time.Second // after which it is lost
	look    = 100 * time.Millisecond
)

// loadNCCL is a variable for tests.
var loadNCCL = nccl.Load

// Join waits until all ranks have come, and makes NCCL's communicators of their GPUs. Without GPUs, collectives are in host memory, and what
// ranks other than rank 0 send to each other passes through rank 0.
//
//   - gpu is this rank's GPU, or several ([device.Open]), as many for all ranks, or nil for all ranks. There is a communicator of the first GPUs
//     of all ranks, one of the second ones, and so on. A GPU value can be in one Comm at a time.
//   - same lists what all ranks must have alike, in any order: settings as texts, such as "seed 7", and checksums of
//     what is long. Join adds this module's version and the number of GPUs. If the lists differ, all ranks end at once,
//     with an error that shows what one rank has and rank 0 has not, and the other way round.
//   - Where LEANATTENTION_SECRET is set, or LEANATTENTION_SECRET_FILE names a file, ranks prove to each other that they
//     know this secret of 16 bytes and more. It is not sent. Others are turned away.
//
// A world of one needs neither others nor NCCL. Ranks without GPUs need no NCCL.
//
// Errors:
//
//   - ErrOption: a world that can't be, or a secret that can't be read or is short.
//   - ErrUnsupported: NCCL is not found (the error says where it was looked for) or too old, or gpu is more than eight GPUs.
//   - ErrRank: a rank does not come, fails, or differs in what all must have alike; or this process is turned away.
//   - ErrState: gpu is in another Comm.
//   - ErrClosed: gpu is closed.
func Join(ctx context.Context, gpu *device.GPU, w World, same ...string) (_ *Comm, err error) {
	const op = "Join"
	if err := w.check(op); err != nil {
		return nil, err
	}
	if w.Timeout == 0 {
		w.Timeout = defaultTimeout
	}
	var devs []*cuda.Device
	var group *queue.Group
	if gpu != nil {
		var leave func()
		if devs, group, leave, err = gpu.Internal().Devices("ranks." + op); err != nil {
			return nil, err
		}
		defer leave()
	}
	c := &Comm{world: w, gpu: gpu, start: time.Now(), stop: make(chan struct{}), guarded: make(chan struct{})}
	c.mark.Set()
	for _, dev := range devs {
		c.members = append(c.members, member{dev: dev})
	}
	if w.Size == 1 {
		close(c.guarded)
		return c, nil
	}
	if len(devs) > ongpu.MostMembers {
		return nil, errorf(op, errs.ErrUnsupported, "%v: %d GPUs of a rank, and %d are the most", gpu, len(devs), ongpu.MostMembers)
	}
	key, err := secret(os.LookupEnv)
	if err != nil {
		return nil, err
	}
	for i, dev := range devs {
		if !dev.SetWatch(watch{c}) {
			unwatch(devs[:i])
			return nil, errorf(op, errs.ErrState, "%v is among ranks already", gpu)
		}
	}
	defer func() {
		if err != nil {
			unwatch(devs)
		}
	}()
	var lib *nccl.Library
	var libErr error
	if gpu != nil {
		lib, libErr = loadNCCL() // who has none tells the others
	} else {
		same = append(slices.Clone(same), byteOrder())
	}
	ids := make([]nccl.ID, len(devs))
	session, made, err := rendezvous.Join(ctx, rendezvous.Config{Rank: w.Rank, Size: w.Size, Address: w.Address, Job: w.Job, Secret: key,
		Same: append(slices.Clone(same), "leanattention "+version(), several(len(devs))), Timeout: w.Timeout, Beat: beat, Silence: silence},
		func() ([]byte, error) {
			if libErr != nil {
				return nil, libErr
			}
			var all []byte
			for range ids {
				id, err := lib.UniqueID()
				if err != nil {
					return nil, err
				}
				all = append(all, id[:]...)
			}
			return all, nil
		})
	if libErr != nil && err != nil {
		err = libErr
	}
	if err != nil {
		return nil, c.joinError(err)
	}
	c.session = session
	defer func() {
		if err != nil {
			session.Fail(err)
			_ = session.Close()
		}
	}()
	if libErr != nil {
		return nil, c.joinError(libErr)
	}
	if len(made) != len(ids)*len(nccl.ID{}) {
		return nil, c.joinError(fmt.Errorf("rank 0 has sent %d bytes for %s", len(made), several(len(ids))))
	}
	for i := range ids {
		copy(ids[i][:], made[i*len(ids[i]):])
	}
	// Who can't go on says so here, not while others wait inside of NCCL.
	if err := session.Barrier(); err != nil {
		return nil, rankError(err)
	}
	if err := c.init(ctx, lib, ids); err != nil {
		return nil, c.joinError(err)
	}
	for i := range c.members {
		c.checks = append(c.checks, group.Member(i).Check(c.failed))
	}
	go c.guard()
	return c, nil
}

// byteOrder is the order of bytes in memory, which ranks send as it is.
func byteOrder() string { return fmt.Sprint("byte order ", binary.NativeEndian.Uint16([]byte{1, 2})) }

func several(gpus int) string {
	if gpus == 0 {
		return "no GPU"
	}
	if gpus == 1 {
		return "one GPU"
	}
	return fmt.Sprintf("%d GPUs", gpus)
}

func unwatch(devs []*cuda.Device) {
	for _, dev := range devs {
		dev.SetWatch(nil)
	}
}

// init is nccl's Init of all members, one behind the other on all ranks. NCCL has no time limit: where a rank fails meanwhile it is
// left behind, to end when it finds out by itself.
func (c *Comm) init(ctx context.Context, lib *nccl.Library, ids []nccl.ID) error {
	type made struct {
		comms []*nccl.Comm
		err   error
	}
	result := make(chan made, 1)
	go func() {
		var m made
		for i := range ids {
			var comm *nccl.Comm
			if comm, m.err = lib.Init(c.members[i].dev, c.world.Size, c.world.Rank, &ids[i]); m.err != nil {
				_ = abort(m.comms)
				m.comms = nil
				break
			}
			m.comms = append(m.comms, comm)
		}
		result <- m
	}()
	limit := time.NewTimer(c.world.Timeout)
	defer limit.Stop()
	drop := func() {
		go func() {
			m := <-result
			_ = abort(m.comms)
		}()
	}
	select {
	case m := <-result:
		for i, comm := range m.comms {
			c.members[i].nccl = comm
		}
		return m.err
	case <-c.session.Done():
		drop()
		return c.session.Err()
	case <-ctx.Done():
		drop()
		return ctx.Err()
	case <-limit.C:
		drop()
		return &failure{c.world.Rank, fmt.Sprintf("NCCL has not connected the ranks within %v", c.world.Timeout)}
	}
}

// abort ends communicators at once: a GPU's work may wait for that of another one.
func abort(comms []*nccl.Comm) error {
	errs := make([]error, len(comms))
	var wait sync.WaitGroup
	for i, comm := range comms {
		wait.Go(func() { errs[i] = comm.Abort() })
	}
	wait.Wait()
	return errors.Join(errs...)
}

// comms are the members' communicators.
func (c *Comm) comms() (all []*nccl.Comm) {
	for _, m := range c.members {
		all = append(all, m.nccl)
	}
	return all
}

// hold keeps the communicators for a recording until the function is called that it returns.
func (c *Comm) hold() (release func()) {
	var all []func()
	for _, comm := range c.comms() {
		all = append(all, comm.Hold())
	}
	return func() {
		for _, release := range all {
			release()
		}
	}
}

func (c *Comm) joinError(err error) error {
	if errors.Is(err, nccl.ErrNoNCCL) || errors.Is(err, nccl.ErrTooOld) {
		return errorf("Join", errs.ErrUnsupported, "rank %d: %v", c.world.Rank, err)
	}
	var e *rendezvous.Error
	if errors.As(err, &e) {
		return rankError(err)
	}
	return fmt.Errorf("ranks: Join: rank %d: %w", c.world.Rank, err)
}

// World returns the world that the Comm was joined by: this process's rank, and the number of processes. The result is the
// zero World if the Comm was not made by Join.
func (c *Comm) World() World {
	if c == nil {
		return World{}
	}
	return c.world
}

// made says whether the Comm comes from Join, and is no copy.
func (c *Comm) made(op string) error {
	const what, by = "Comm", "Join"
	problem := nocopy.Unmade(what, by)
	if c != nil {
		problem = c.mark.Problem(what, by)
	}
	if problem != "" {
		return errorf(op, errs.ErrState, "%s", problem)
	}
	return nil
}

// Err returns the failure that has ended the work of all ranks, or nil. Results that were computed since are undefined:
// downloads and replays return the failure, too.
//
// A failure is ErrRank. Its text has the rank and the reason: the process has ended or is silent, it has called [Comm.Fail],
// NCCL reports an error, or the others have waited longer than [World].Timeout.
func (c *Comm) Err() error {
	if err := c.made("Comm.Err"); err != nil {
		return err
	}
	if c.session == nil {
		return nil
	}
	err := c.session.Err()
	if err == rendezvous.ErrClosed {
		return errorf("Comm", errs.ErrClosed, "rank %d has left", c.world.Rank)
	}
	return rankError(err)
}

// Barrier waits until all ranks have called Barrier. It does not wait for the work of GPUs. Errors: those of [Comm.Err].
func (c *Comm) Barrier() error {
	if err := c.made("Comm.Barrier"); err != nil {
		return err
	}
	if c.session == nil {
		return nil
	}
	return rankError(c.session.Barrier())
}

// Fail ends the work of all ranks with this error. A rank calls Fail if it stops for a reason that the Comm does not see,
// such as a file that it cannot read.
func (c *Comm) Fail(err error) {
	if c.made("") == nil && c.session != nil && err != nil {
		c.session.Fail(err)
	}
}

// watch is told of the driver's calls, which may wait for other ranks.
type watch struct{ *Comm }

func (c watch) Waiting() {
	if c.waits.Add(1) == 1 {
		c.since.Store(int64(time.Since(c.start)))
	}
}

func (c watch) Waited() { c.waits.Add(-1) }

// failed is why what the host has waited for is no good.
func (c *Comm) failed() error {
	if err := c.Err(); errors.Is(err, queue.ErrRank) {
		return err
	}
	return nil
}

// guard looks after the others while there is work that needs them, until the Comm is closed
// or a rank has failed.
func (c *Comm) guard() {
	defer close(c.guarded)
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		select {
		case <-c.stop:
			return
		case <-c.session.Done():
			if errors.Is(c.Err(), queue.ErrRank) {
				_ = abort(c.comms()) // what waits for others ends
			}
			return
		case <-tick.C:
			if err := c.trouble(); err != nil {
				c.session.Fail(err)
			}
		}
	}
}

// trouble is why this rank can't go on.
func (c *Comm) trouble() error {
	for _, comm := range c.comms() {
		if err := comm.AsyncError(); err != nil && !errors.Is(err, nccl.ErrAborted) {
			return err
		}
	}
	if c.waits.Load() == 0 {
		return nil
	}
	waited := time.Since(c.start) - time.Duration(c.since.Load())
	if r := c.session.Gone(); r >= 0 && waited > silence {
		return fmt.Errorf("it waits for rank %d, which has left", r)
	}
	if waited > c.world.Timeout {
		return fmt.Errorf("it has waited for the others for %v", c.world.Timeout)
	}
	return nil
}

// Close waits until all ranks have called Close, and disconnects. So no rank interrupts the work of another. Close recordings
// with collectives of the Comm before the Comm, and the GPU after the Comm.
//
// Errors: ErrState, with no effect, while there are such recordings; ErrClosed for a second Close.
func (c *Comm) Close() error {
	const op = "Comm.Close"
	if err := c.made(op); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errorf(op, errs.ErrClosed, "rank %d", c.world.Rank)
	}
	if c.session == nil {
		c.closed = true
		return nil
	}
	for _, comm := range c.comms() {
		if comm.Recorded() {
			return errorf(op, errs.ErrState, "%v", nccl.ErrRecorded)
		}
	}
	failed := c.session.Err()
	if failed == nil {
		failed = c.session.Barrier()
	}
	c.closed = true
	if failed == nil {
		close(c.stop)
	}
	<-c.guarded
	var err error
	for _, m := range c.members {
		if failed == nil {
			err = errors.Join(err, m.nccl.Close())
		}
		m.dev.SetWatch(nil)
	}
	for _, stop := range c.checks {
		stop()
	}
	if e := c.session.Close(); err == nil {
		err = e
	}
	if err != nil {
		return fmt.Errorf("ranks: %s: %w", op, err)
	}
	return nil
}
