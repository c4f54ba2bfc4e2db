package measure

import (
	"os/exec"
	"syscall"
)

// apart puts the process into a process group of its own. Ctrl+C in the console reaches leanbench's group
// only.
func apart(c *exec.Cmd) {
	if c.SysProcAttr == nil {
		c.SysProcAttr = new(syscall.SysProcAttr)
	}
	c.SysProcAttr.CreationFlags |= syscall.CREATE_NEW_PROCESS_GROUP
}
