package measure

import (
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

func TestWorker(t *testing.T) {
	w, err := Start(measuretest.Command(t, "well"))
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(w.Hello, " "); got != "Fake 1.0" {
		t.Errorf("hello %q", got)
	}
	if words, err := w.Ask("shape %d", 3); err != nil || len(words) != 0 {
		t.Errorf("answer %q (%v)", words, err)
	}
	times, rest, err := w.Seconds(2, "decode 1 2 %d", 4)
	if err != nil || times[0] != 500*time.Millisecond || times[1] != 4*time.Millisecond || strings.Join(rest, " ") != "7 8 9" {
		t.Errorf("times %v, rest %q (%v)", times, rest, err)
	}
	for question, want := range map[string]string{
		"refuse it": `"refuse it": the worker says "error no such shape"`,
		"chat":      `the worker says "well ..."`,
	} {
		if _, err := w.Ask("%s", question); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", question, err)
		}
	}
	if _, _, err := w.Seconds(1, "shape"); err == nil {
		t.Error("an answer without a time is one")
	}
	if _, _, err := w.Seconds(3, "decode 1 2 3"); err != nil {
		t.Error(err)
	}
	if _, err := w.Ask("die"); err == nil || !strings.Contains(err.Error(), "has ended:") || !strings.Contains(err.Error(), "out of memory") {
		t.Errorf("after its end: %v", err)
	}
	if _, err := w.Ask("run sdpa 1"); err == nil {
		t.Error("a dead worker answers")
	}
	if err := w.Close(); err == nil || !strings.Contains(err.Error(), "exit status 4") {
		t.Errorf("close: %v", err)
	}
	// The same program comes in its place.
	w.Patience = time.Minute
	again, err := w.Again()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.Ask("shape 3"); err != nil || strings.Join(again.Hello, " ") != "Fake 1.0" || again.Gone || again.Patience != time.Minute {
		t.Errorf("%v, hello %q, gone %v", err, again.Hello, again.Gone)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}

	// Who is silent for too long is ended, and gives no later answers for those to later questions.
	if w, err = Start(measuretest.Command(t, "opt-silent")); err != nil {
		t.Fatal(err)
	}
	w.Patience = 50 * time.Millisecond
	if _, err := w.Ask("read compiled 1 2 3"); err == nil || !strings.Contains(err.Error(), "silent for 50ms") || !w.Gone {
		t.Errorf("silence: %v, gone %v", err, w.Gone)
	}
	if _, err := w.Ask("forget"); err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("behind a silence: %v", err)
	}
	if err := w.Close(); err == nil {
		t.Error("a worker that was killed has ended well")
	}

	if w, err = Start(measuretest.Command(t, "well")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if _, err := Start(measuretest.Command(t, "broken")); err == nil || !strings.Contains(err.Error(), "cannot import torch") {
		t.Errorf("broken: %v", err)
	}
	if _, err := StartWorker("/no/such/python", "print()"); err == nil {
		t.Error("a python that is not there started")
	}
}

func TestMain(m *testing.M) { measuretest.Main(m) }
