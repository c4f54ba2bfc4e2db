//go:build unix

package measure

import (
	"os/exec"
	"syscall"
)

// apart has a process be the first of a group of its own. A terminal's interrupt, and what timeout sends, is for all of our group.
func apart(c *exec.Cmd) {
	if c.SysProcAttr == nil {
		c.SysProcAttr = new(syscall.SysProcAttr)
	}
	c.SysProcAttr.Setpgid = true
}
